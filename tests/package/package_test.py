#!/usr/bin/env python3
"""package_test.py BUILD: cpack's Debian package, installed in a clean root: what is in it, that nothing of the build
shows, and that the examples build and run against it, out of the tree, with CMake and with pkg-config."""

import gzip
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import unittest
from pathlib import Path

BUILD = Path(sys.argv.pop(1)).resolve() if len(sys.argv) > 1 else None
SOURCE = Path(__file__).resolve().parents[2]

# One of each kind that an installation must have; patterns, since the library folder is the system's choice.
EXPECTED = [
    r"usr/bin/terrace", r"usr/bin/terraced", r"usr/lib/.*libterrace_preload\.so", r"usr/lib/.*libterrace\.so\.\d+\.\d+\.\d+",
    r"usr/lib/.*libterrace\.so", r"usr/lib/.*libterrace\.a", r"usr/include/terrace/terrace\.h",
    r"usr/include/terrace/hooks/c_abi/terrace\.h", r"usr/include/terrace/swapcore/session\.hpp",
    r"usr/include/terrace/hooks/c_abi/terrace_stash\.h", r"usr/lib/terrace_python/terrace/torch/plugin\.py",
    r"usr/lib/.*cmake/Terrace/TerraceConfig\.cmake", r"usr/lib/.*pkgconfig/terrace\.pc",
    r"usr/lib/.*pkgconfig/terrace-swapcore\.pc", r"usr/share/man/man1/terrace\.1\.gz", r"usr/share/man/man8/terraced\.8\.gz",
    r"usr/share/man/man5/terrace\.toml\.5\.gz", r"usr/lib/systemd/system/terraced\.service",
    r"usr/share/doc/terrace/examples/policies/defaults\.toml", r"usr/share/terrace/dashboards/.+",
    r"usr/share/bash-completion/completions/terrace", r"usr/share/zsh/vendor-completions/_terrace",
    r"usr/share/fish/vendor_completions\.d/terrace\.fish", r"usr/share/doc/terrace/copyright",
    r"usr/share/doc/terrace/changelog\.gz", r"etc/terrace/terrace\.toml",
]
NOT_INSTALLED = re.compile(r"_test$|moe_trainer|gtest|toml\+\+|\.cpp$")
EXAMPLES = "usr/share/doc/terrace/examples"


def run(command, **options):
    """The output of a command that must succeed."""
    answer = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False, timeout=500, **options)
    if answer.returncode != 0:
        raise AssertionError(f"{command} ended with {answer.returncode}:\n{answer.stdout}{answer.stderr}")
    return answer.stdout


def install(package, root):
    """With dpkg, against the packages that this machine has, so that missing dependencies are refused; else unpacked."""
    if os.geteuid() != 0:
        run(["dpkg-deb", "-x", package, root])
        return
    admin = root / "var/lib/dpkg"
    (admin / "updates").mkdir(parents=True)
    (admin / "info").mkdir()  # the others' files are not in this root
    status = Path("/var/lib/dpkg/status").read_text(encoding="utf-8")
    (admin / "status").write_text(re.sub(r"(?m)^Conffiles:\n(?: .*\n)*", "", status), encoding="utf-8")
    run(["dpkg", f"--root={root}", "--force-script-chrootless", "--no-triggers", "--install", package])


def elf_files(root):
    for path in sorted(root.glob("usr/**/*")):
        if path.is_file() and not path.is_symlink() and path.read_bytes().startswith(b"\x7fELF"):
            yield path


class Package(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        holder = tempfile.TemporaryDirectory(prefix="terrace-package-")
        cls.addClassCleanup(holder.cleanup)
        cls.folder = Path(holder.name)
        run(["cpack", "-G", "DEB", "-B", cls.folder / "cpack"], cwd=BUILD)
        cls.package = next((cls.folder / "cpack").glob("*.deb"))
        cls.root = cls.folder / "root"
        cls.root.mkdir()
        install(cls.package, cls.root)
        cls.libraries = next(cls.root.glob("usr/lib/**/libterrace.a")).parent

    def members(self):
        data = subprocess.run(["dpkg-deb", "--fsys-tarfile", self.package], capture_output=True, check=True).stdout
        with tempfile.TemporaryFile() as file:
            file.write(data)
            file.seek(0)
            with tarfile.open(fileobj=file) as archive:
                return archive.getmembers()

    def field(self, name):
        return run(["dpkg-deb", "--field", self.package, name]).strip()

    def test_everything_is_in_it_and_nothing_else(self):
        names = [member.name.removeprefix("./") for member in self.members() if not member.isdir()]
        for pattern in EXPECTED:
            self.assertTrue(any(re.fullmatch(pattern, name) for name in names), f"{pattern} is not in {names}")
        inside = [name for name in names if not name.startswith(EXAMPLES) and NOT_INSTALLED.search(name)]
        self.assertEqual(inside, [])

    def test_modes_and_owners(self):
        for member in self.members():
            self.assertEqual((member.uid, member.gid), (0, 0), member.name)
            program = member.isdir() or member.name.startswith("./usr/bin/")
            if not member.issym():
                self.assertEqual(member.mode & 0o7777, 0o755 if program else 0o644, member.name)

    def test_dependencies_are_those_of_the_binaries(self):
        depends = self.field("Depends")
        for library in ("libc6", "libstdc++6", "libhwloc15", "libnuma1"):
            self.assertRegex(depends, rf"\b{re.escape(library)}\b")
        self.assertNotRegex(depends, "cuda|nvidia|-dev")
        self.assertEqual(self.field("Package"), "terrace")

    def test_the_settings_are_the_administrators(self):
        control = self.folder / "control"
        run(["dpkg-deb", "--control", self.package, control])
        self.assertEqual((control / "conffiles").read_text(encoding="utf-8"), "/etc/terrace/terrace.toml\n")
        self.assertIn("ok\n", run([self.root / "usr/bin/terrace", "check", self.root / "etc/terrace/terrace.toml"]))

    def test_nothing_of_the_build_shows(self):
        found = list(elf_files(self.root))
        self.assertGreaterEqual(len(found), 4)
        for path in found:
            dynamic = run(["readelf", "-dW", path])
            self.assertNotRegex(dynamic, "RPATH|RUNPATH", path.name)
            self.assertNotIn(".debug_info", run(["readelf", "-SW", path]), path.name)
        for path in self.root.glob("usr/**/*"):
            if path.is_file():
                text = path.read_bytes()
                for place in (BUILD, SOURCE):
                    self.assertNotIn(str(place).encode(), text, f"{path} names {place}")

    def test_manual_pages_render(self):
        for page in self.root.glob("usr/share/man/man*/*.gz"):
            text = gzip.decompress(page.read_bytes())
            answer = subprocess.run(["groff", "-man", "-Tutf8", "-ww", "-z"], input=text, capture_output=True, check=False)
            self.assertEqual((answer.returncode, answer.stderr.decode()), (0, ""), page.name)

    def test_the_manual_and_the_completions_name_every_subcommand(self):
        listed = re.search(r"Subcommands:\n((?:  .*\n)+)", run([self.root / "usr/bin/terrace", "--help"])).group(1)
        commands = re.findall(r"^  (\S+)", listed, re.M)
        self.assertIn("run", commands)
        manual = gzip.decompress((self.root / "usr/share/man/man1/terrace.1.gz").read_bytes()).decode().replace("\\-", "-")
        share = self.root / "usr/share"
        for command in commands:
            self.assertIn(f".SS \\fBterrace {command}\\fR", manual)
            for file in ("bash-completion/completions/terrace", "zsh/vendor-completions/_terrace",
                         "fish/vendor_completions.d/terrace.fish"):
                self.assertRegex((share / file).read_text(encoding="utf-8"), rf"\b{command}\b")

    def test_the_unit_starts_the_installed_daemon(self):
        unit = (self.root / "usr/lib/systemd/system/terraced.service").read_text(encoding="utf-8")
        self.assertRegex(unit, r"(?m)^ExecStart=/usr/bin/terraced\b")
        self.assertNotIn("@", unit.replace("%", ""))

    def check_examples(self, folder):
        environment = {**os.environ, "LD_LIBRARY_PATH": str(self.libraries)}
        self.assertIn("kept: use it", run([folder / "quickstart"], env=environment))
        self.assertIn("every fetched byte was as offered", run([folder / "c_api"], env=environment))

    def test_examples_with_cmake(self):
        build = self.folder / "with-cmake"
        run(["cmake", "-S", self.root / EXAMPLES, "-B", build, f"-DTerrace_DIR={self.libraries}/cmake/Terrace"])
        run(["cmake", "--build", build])
        self.check_examples(build)

    def test_examples_with_pkg_config(self):
        build = self.folder / "with-pkg-config"
        build.mkdir()
        environment = {**os.environ, "PKG_CONFIG_PATH": f"{self.libraries}/pkgconfig"}

        def flags(package):
            return run(["pkg-config", "--cflags", "--libs", package], env=environment).split()

        examples = self.root / EXAMPLES
        run(["c++", "-std=c++20", examples / "quickstart/quickstart.cpp", "-o", build / "quickstart", *flags("terrace-swapcore")])
        run(["cc", examples / "c_api/main.c", "-o", build / "c_api", *flags("terrace")])
        self.check_examples(build)

    def test_another_version_is_not_accepted(self):
        project = self.folder / "too-new"
        project.mkdir()
        (project / "CMakeLists.txt").write_text(
            "cmake_minimum_required(VERSION 3.25)\nproject(p LANGUAGES CXX)\nfind_package(Terrace 99.0 REQUIRED)\n", encoding="utf-8")
        with self.assertRaisesRegex(AssertionError, "99.0"):
            run(["cmake", "-S", project, "-B", project / "build", f"-DTerrace_DIR={self.libraries}/cmake/Terrace"])

    def test_terrace_run_finds_daemon_and_preload_library(self):
        socket = self.folder / "s"
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("TERRACE_", "LD_PRELOAD"))}
        shown = run([self.root / "usr/bin/terrace", "run", "--socket", socket, "--listen", "127.0.0.1:0", "--",
                     "sh", "-c", f"echo $LD_PRELOAD; echo $PYTHONPATH; {self.root}/usr/bin/terrace status --json"], env=environment)
        self.assertIn(f"{self.libraries}/libterrace_preload.so", shown)
        self.assertIn(f"{self.root}/usr/lib/terrace_python/start", shown)
        self.assertIn(f'"socket":"{socket}"', shown)

    def test_removed_it_leaves_nothing(self):
        if os.geteuid() != 0:
            self.skipTest("dpkg needs root to install and remove")
        root = self.folder / "removed"
        root.mkdir()
        install(self.package, root)
        run(["dpkg", f"--root={root}", "--force-script-chrootless", "--no-triggers", "--purge", "terrace"])
        self.assertEqual([path for top in ("usr", "etc") for path in root.glob(f"{top}/**/*") if not path.is_dir()], [])


if __name__ == "__main__":
    unittest.main()
