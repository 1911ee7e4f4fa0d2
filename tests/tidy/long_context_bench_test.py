#!/usr/bin/env python3
"""bench/long_context.py: its rows, and what makes it fail, with a program that stands in for the trainer."""
import unittest

from stand_in_trainer import StandInBench

# 1000 live bytes in each step, and offloading sends some to DDR, where a slab is pinned in any case.
TRAINER = """#!/usr/bin/env python3
import json, os, sys
options = dict(zip(sys.argv[1:], sys.argv[2:]))
offloaded = 'contingency = "offload"' in open(options["--policy"]).read()
steps, grown = int(options["--steps"]), int(os.environ.get("FAKE_GROWTH", 0))
steps -= "FAKE_SHORT" in os.environ
loss = 2.5 + (1e-7 if offloaded and "FAKE_OTHER_BITS" in os.environ else 0)
spilled = 32 if offloaded and "FAKE_NOTHING_LEAVES" not in os.environ else 0
json.dump({"ms_per_step": 10.0, "tokens_per_second": float(options["--length"]), "hbm_peak_bytes": 1200, "ddr_peak_bytes": 64,
           "spilled_bytes": spilled,
           "losses": [loss] * steps, "losses_hex": [loss.hex()] * steps, "stall_seconds": 0.002 * steps,
           "by_step": [{"hbm_live_peak_bytes": 1000 + grown * i} for i in range(steps)]}, open(options["--json"], "w"))
"""


class Verdicts(StandInBench):
    bench_name, trainer = "long_context", TRAINER

    def test_every_case_has_its_rows(self):
        answer, rows = self.take_rows("--steps", "20")
        self.assertEqual(answer.returncode, 0, answer.stderr)
        by_key = {(row["case"], row["metric"]): row["value"] for row in rows}
        self.assertEqual(by_key["offloaded/4096", "tokens_per_second"], 4096)
        self.assertEqual(by_key["offloaded/4096", "ddr_peak_bytes"], 64)
        self.assertAlmostEqual(by_key["kept/1024", "stall_ms"], 2)
        self.assertEqual(by_key["kept/1024", "hbm_growth_ratio"], 1)
        self.assertNotIn(("kept/512", "hbm_growth_ratio"), by_key, "it has no step that runs by a plan")

    def test_what_is_wrong_is_said(self):
        for fake, said in {"FAKE_GROWTH": "kept/1024: live bytes grow by", "FAKE_SHORT": "kept/1024: 5 steps of 6",
                           "FAKE_NOTHING_LEAVES": "offloaded/4096: nothing went to DDR",
                           "FAKE_OTHER_BITS": "512: losses differ"}.items():
            answer, _ = self.take_rows("--steps", "20", **{fake: "50"})
            self.assertEqual(answer.returncode, 1, fake)
            self.assertIn(said, answer.stderr)

    def test_an_unknown_case_names_those_that_there_are(self):
        answer, _ = self.take_rows("--case", "kept/9")
        self.assertEqual(answer.returncode, 2)
        self.assertIn("kept/1024", answer.stderr)


if __name__ == "__main__":
    unittest.main()
