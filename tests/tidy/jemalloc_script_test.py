#!/usr/bin/env python3
"""cmake/jemalloc.sh without a network: whose package sources it asks, where it builds, what it refuses."""

import os
import shutil
import subprocess
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

DEB822 = """Types: deb
URIs: http://mirror.example/debian
Suites: bookworm bookworm-updates
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

# a second one
types: deb deb-src
Enabled: no
URIs: http://other.example/debian
Suites: sid
Components: main
"""
ONE_LINE = """# deb http://commented.example/debian bookworm main
deb [arch=amd64 signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://mirror.example/debian bookworm main
deb http://second.example/debian bookworm main contrib
deb-src http://second.example/debian bookworm main contrib
"""
APT_CONFIG = """#!/bin/sh
echo "list='{0}/sources.list'"
echo "parts='{0}/sources.list.d/'"
"""


class JemallocScript(unittest.TestCase):
    def setUp(self):
        holder = tempfile.TemporaryDirectory()
        self.addCleanup(holder.cleanup)
        self.folder = Path(holder.name)
        self.tree = self.folder / "tree"
        (self.tree / "cmake").mkdir(parents=True)
        self.script = self.tree / "cmake" / "jemalloc.sh"
        shutil.copy(ROOT / "cmake" / "jemalloc.sh", self.script)

    def run_script(self, *arguments, **environment):
        variables = {name: value for name, value in os.environ.items() if name not in ("HOME", "XDG_CACHE_HOME")}
        variables |= environment
        return subprocess.run(["bash", self.script, *arguments], env=variables, capture_output=True, text=True, check=False)

    def where(self, **environment):
        answer = self.run_script("where", **environment)
        self.assertEqual(answer.returncode, 0, answer.stderr)
        return Path(answer.stdout.strip())

    def test_asks_the_machines_own_sources_for_source_packages(self):
        parts = self.folder / "apt" / "sources.list.d"
        parts.mkdir(parents=True)
        (self.folder / "apt" / "sources.list").write_text(ONE_LINE)
        (parts / "debian.sources").write_text(DEB822)
        (parts / "disabled.sources.off").write_text(DEB822)
        tools = self.folder / "tools"
        tools.mkdir()
        (tools / "apt-config").write_text(APT_CONFIG.format(self.folder / "apt"))
        (tools / "apt-config").chmod(0o755)
        out = self.folder / "out"
        answer = self.run_script("sources", str(out), PATH=f"{tools}:{os.environ['PATH']}")
        self.assertEqual(answer.returncode, 0, answer.stderr)
        self.assertEqual({path.name for path in out.iterdir()}, {"sources.list", "debian.sources"})
        self.assertEqual((out / "debian.sources").read_text(),
                         DEB822.replace("Types: deb\n", "Types: deb-src\n").replace("types: deb deb-src\n", "Types: deb-src\n"))
        self.assertEqual((out / "sources.list").read_text().splitlines(), [
            "deb-src [arch=amd64 signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://mirror.example/debian bookworm main",
            "deb-src http://second.example/debian bookworm main contrib"])

    def test_is_kept_in_the_cache_folder_or_else_in_the_build_folder(self):
        cache = self.folder / "cache"
        self.assertEqual(self.where(XDG_CACHE_HOME=str(cache)).parent, cache / "terrace")
        self.assertEqual(self.where(HOME=str(self.folder)).parent, self.folder / ".cache" / "terrace")
        (self.folder / "file").write_text("no folder can be made here")
        for environment in ({}, {"XDG_CACHE_HOME": str(self.folder / "file")}, {"XDG_CACHE_HOME": "relative"}):
            self.assertEqual(self.where(**environment).parent, self.tree / "build" / "deps")
        self.assertFalse(cache.exists(), "asking where makes nothing")

    def test_finds_what_was_built_in_the_second_place(self):
        built = self.where()
        for name in ("lib/libterrace_jemalloc.a", "include/terrace_jemalloc.h"):
            (built / name).parent.mkdir(parents=True)
            (built / name).touch()
        cache = str(self.folder / "cache")
        self.assertEqual(self.where(XDG_CACHE_HOME=cache), built)
        self.assertEqual(self.run_script("ready", XDG_CACHE_HOME=cache).returncode, 0)
        self.assertEqual(self.run_script("build", XDG_CACHE_HOME=cache).returncode, 0, "what is there is not built anew")

    def test_other_options_are_another_build(self):
        cache = str(self.folder / "cache")
        before = self.where(XDG_CACHE_HOME=cache)
        text = self.script.read_text()
        self.script.write_text(text + "\n# a remark\n")
        self.assertEqual(self.where(XDG_CACHE_HOME=cache), before)
        self.script.write_text(text.replace("--disable-stats", "--enable-stats"))
        self.assertNotEqual(self.where(XDG_CACHE_HOME=cache), before)

    def test_refuses_another_source(self):
        cache = self.folder / "cache"
        tarball = self.folder / "jemalloc.tar.bz2"
        tarball.write_bytes(b"something else")
        answer = self.run_script("build", str(tarball), XDG_CACHE_HOME=str(cache))
        self.assertEqual(answer.returncode, 1)
        self.assertIn("is not jemalloc 5.3.0 as released", answer.stderr)
        self.assertFalse(cache.exists())
        self.assertEqual(self.run_script("ready", XDG_CACHE_HOME=str(cache)).returncode, 1)


if __name__ == "__main__":
    unittest.main()
