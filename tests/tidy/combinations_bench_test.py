#!/usr/bin/env python3
"""bench/combinations.py: its rows, its table, and what makes it fail, with a program that stands in for the trainer."""
import unittest

from stand_in_trainer import StandInBench, load

# No recomputation holds 1000 bytes, else 600; what is on moves bytes over three steps.
TRAINER = """#!/usr/bin/env python3
import json, os, sys
options = dict(zip(sys.argv[1:], sys.argv[2:]))
policy = open(options["--policy"]).read()
swapcore, experts, optimizer = options["--swapcore"] == "auto", "[experts]" in policy, "[optimizer]" in policy
budget = int(options.get("--hbm", 0))
assert (budget == 700) == swapcore, budget
peak = 1000 if options["--recompute"] == "none" else 600
loss = 2.5 + (1e-7 if experts and os.environ.get("FAKE_OTHER_BITS") else 0)
json.dump({"ms_per_step": 10.0 - 2 * swapcore + experts, "hbm_peak_bytes": peak + 200 * (swapcore and "FAKE_OVER" in os.environ),
           "ddr_peak_bytes": 2, "losses": [loss] * 3, "losses_hex": [loss.hex()] * 3, "stall_seconds": 0.003,
           "spilled_bytes": 3e6 * swapcore, "restored_bytes": 3e6 * swapcore, "experts_fetched_bytes": 6e6 * experts,
           "state_fetched_bytes": 9e6 * optimizer, "state_written_bytes": 3e6 * optimizer}, open(options["--json"], "w"))
"""


class Rows(unittest.TestCase):
    def test_a_row_says_what_moved_and_whether_it_is_right(self):
        bench = load("combinations")
        result = {"losses": [1.0, 1.0], "hbm_peak_bytes": 8, "spilled_bytes": 4, "restored_bytes": 2,
                  "experts_fetched_bytes": 6, "state_fetched_bytes": 2, "state_written_bytes": 2}
        row = bench.Row("lora", ["swapcore", "experts"], result, budget=8)
        self.assertEqual((row.case, row.moved_bytes(), row.wrong()), ("lora/swapcore+experts", 8, None))
        row.budget = 7
        self.assertIn("above the budget of 7", row.wrong())
        row.same_bits = False
        self.assertIn("bit for bit", row.wrong())

    def test_trained_experts_leave_with_their_state(self):
        settings = load("combinations").SETTINGS
        for setting in ("trained", "accumulated"):
            self.assertTrue(all("optimizer" in parts for parts in settings[setting] if "experts" in parts))


class Verdicts(StandInBench):
    bench_name, trainer = "combinations", TRAINER

    def test_one_table(self):
        answer, rows = self.take_rows()
        self.assertEqual(answer.returncode, 0, answer.stderr)
        by_key = {(row["case"], row["metric"]): row["value"] for row in rows}
        self.assertEqual(by_key["trained/plain", "moved_bytes"], 0)
        self.assertEqual(by_key["trained/swapcore+experts+optimizer", "moved_bytes"], 8e6)
        self.assertAlmostEqual(by_key["lora/swapcore", "step_time_ratio_to_plain"], 0.8)
        self.assertEqual(by_key["accumulated/optimizer", "bits_equal"], 1)
        self.assertIn("lora/swapcore+experts", answer.stderr)
        self.assertIn("micro_batches = 4", (self.folder / "out" / "accumulated.toml").read_text(encoding="utf-8"))

    def test_other_bits(self):
        answer, rows = self.take_rows("--setting", "lora", FAKE_OTHER_BITS="1")
        self.assertEqual(answer.returncode, 1)
        self.assertIn("lora/experts: losses are not those of plain", answer.stderr)
        self.assertEqual({row["case"].split("/")[0] for row in rows}, {"lora"})

    def test_a_peak_above_the_budget(self):
        answer, _ = self.take_rows("--setting", "trained", FAKE_OVER="1")
        self.assertEqual(answer.returncode, 1)
        self.assertIn("trained/swapcore: peak 800 is above the budget of 700", answer.stderr)


if __name__ == "__main__":
    unittest.main()
