#!/usr/bin/env python3
"""bench/oversubscribed.py: its floor, its rows, and what makes it fail, with programs that stand in for the guest."""

import json
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# With a budget (HOLDS is set by what stands in for `terrace run`) it is slower, and has other bits where it is told to.
GUEST = """#!/usr/bin/env python3
import json, os
held = os.environ.get("HELD")
print(json.dumps({"step_seconds": float(os.environ["SLOW"] if held else "0.5"), "h2d": 1e9, "d2h": 1e9, "both": 1.6e9,
                  "context_bytes": 0, "checksum": "b" if held and os.environ.get("OTHER_BITS") else "a"}))
"""
TERRACE = """#!/bin/sh
grep -q 'budget = "512MiB"' "$3" || exit 9
shift 4
HELD=1 exec "$@"
"""


class Oversubscribed(unittest.TestCase):
    def run_bench(self, **environment):
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "bin").mkdir()
            for name, text in (("oversubscribed", GUEST), ("terrace", TERRACE)):
                program = Path(folder) / "bin" / name
                program.write_text(text, encoding="utf-8")
                program.chmod(0o755)
            return subprocess.run([sys.executable, str(ROOT / "bench" / "oversubscribed.py"), "--build", folder, "--blocks", "4",
                                   "--block-mib", "256"], capture_output=True, text=True, check=False,
                                  env={**os.environ, **environment})

    def test_the_floor_is_what_travels_where_that_takes_longer(self):
        done = self.run_bench(SLOW="0.7")
        self.assertEqual(done.returncode, 0, done.stderr)
        rows = {row["metric"] + " " + row["system"]: row for row in map(json.loads, done.stdout.splitlines())}
        # 512 MiB leave and return at 1.6 GB/s.
        self.assertAlmostEqual(rows["step terrace"]["floor"], (1 << 30) / 1.6e9 * 1e3)
        self.assertAlmostEqual(rows["step_over_floor terrace"]["value"], 0.7 / ((1 << 30) / 1.6e9))
        self.assertEqual(rows["bits_equal terrace"]["value"], 1)

    def test_too_slow_or_other_bits_is_an_error(self):
        self.assertIn("times its floor", self.run_bench(SLOW="0.9").stderr)
        done = self.run_bench(SLOW="0.7", OTHER_BITS="1")
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("the bits differ", done.stderr)


if __name__ == "__main__":
    unittest.main()
