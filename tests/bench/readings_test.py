"""bench/readings.py: what it takes, in which order, and that no process outlives the limit. No benchmark runs here."""

import contextlib
import io
import json
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))
import readings  # noqa: E402


def reading(name, code, seconds=0, **more):
    return readings.Reading(name, seconds, (code,), **more)


class Readings(unittest.TestCase):
    def take(self, table, *arguments):
        """The exit code, how each ended, and the folder."""
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        with mock.patch.object(readings, "READINGS", table), contextlib.redirect_stderr(io.StringIO()), \
             mock.patch.object(readings, "command_of", lambda each, _: [sys.executable, "-c", each.command[0]]):
            code = readings.main(["--out", folder.name, *arguments])
        results = json.loads((Path(folder.name) / "readings.json").read_text(encoding="utf-8"))
        return code, {each["name"]: each["ended"] for each in results}, Path(folder.name)

    def test_benchmarks_and_test_programs_exist(self):
        sources = (ROOT / "bench" / "CMakeLists.txt").read_text(encoding="utf-8")
        tests = (ROOT / "tests" / "trainer" / "ops_tests.cmake").read_text(encoding="utf-8")
        for each in readings.READINGS:
            name = each.command[0]
            with self.subTest(each.name):
                if "/" in name:
                    self.assertTrue((ROOT / name).is_file(), name)
                elif each.sanitizer:
                    self.assertRegex(tests, rf"\b{name.removeprefix('op_').removesuffix('_test')}\b")
                else:
                    self.assertTrue((ROOT / "bench" / f"{name}.py").is_file() or f"bench_{name}" in sources, name)
        names = [each.name for each in readings.READINGS]
        self.assertEqual(len(names), len(set(names)))

    def test_rows_and_words_are_kept_and_bits_come_first(self):
        code, ended, out = self.take((
            reading("timed", "import time; print(time.time()); raise SystemExit(3)"),
            reading("bits", "import sys, time; print(time.time()); sys.stderr.write('well')", timed=False)))
        self.assertEqual((code, ended), (1, {"bits": 0, "timed": 3}))
        self.assertEqual((out / "bits.log").read_text(encoding="utf-8"), "well")
        first, second = (float((out / f"{name}.jsonl").read_text(encoding="utf-8")) for name in ("bits", "timed"))
        self.assertLess(first, second)

    def test_at_the_limit_it_ends_with_all_that_it_started(self):
        child = "import subprocess, sys; c = subprocess.Popen(['sleep', '60']); print(c.pid, flush=True); c.wait()"
        code, ended, out = self.take((reading("slow", child), reading("later", "pass", seconds=1)), "--seconds", "2")
        self.assertEqual((code, ended), (1, {"slow": "ended by the limit", "later": "no time"}))
        number = (out / "slow.jsonl").read_text(encoding="utf-8").strip()
        state = subprocess.run(["ps", "-o", "stat=", "-p", number], capture_output=True, text=True, check=False).stdout
        self.assertIn(state[:1], ("", "Z"))

    def test_only_what_is_named_and_what_the_machine_can_hold(self):
        table = (reading("one", "pass"), reading("two", "raise SystemExit(1)"), reading("pair", "pass", gpus=2))
        self.assertEqual(self.take(table, "--only", "one", "--only", "pair")[:2], (0, {"one": 0}))
        self.assertEqual(self.take(table, "--only", "p*", "--gpus", "2")[:2], (0, {"pair": 0}))
        with self.assertRaisesRegex(SystemExit, "no reading is named \"three\""):
            self.take(table, "--only", "three")


if __name__ == "__main__":
    unittest.main()
