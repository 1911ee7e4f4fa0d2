#!/usr/bin/env python3
"""bench/experts.py: the configurations that it makes, its floors, and what makes it fail, with a program that stands in
for the trainer."""
import tomllib
import unittest

from stand_in_trainer import StandInBench, load

# 12 ms with anything in DDR, else 10; three steps move 6 MB in and 3 MB home.
TRAINER = """#!/usr/bin/env python3
import json, os, sys
options = dict(zip(sys.argv[1:], sys.argv[2:]))
policy = open(options["--policy"]).read()
tiered = "[" in policy
span = {"forward_seconds": 1e-3, "backward_seconds": 2e-3}
loss = 2.5 + (1e-7 if tiered and os.environ.get("FAKE_OTHER_BITS") else 0)
json.dump({"ms_per_step": 12.0 if tiered else 10.0, "hbm_peak_bytes": int(os.environ.get("FAKE_PEAK", 1)), "ddr_peak_bytes": 2, "losses": [loss] * 3,
           "losses_hex": [loss.hex()] * 3, "experts_fetched_bytes": 6e6, "state_fetched_bytes": 60e6, "state_written_bytes": 30e6,
           "experts_ddr_bytes": int(os.environ.get("FAKE_EXPERTS", 1 << 30)), "experts_load": "router", "experts_fired_share": 0.25, "experts_break_even_share": 0.5, "router_stall_seconds": 0.006,
           "expert_stall_seconds": 0.003, "optimizer_stall_seconds": 0.006,
           "swapcore_snapshot": {"layers": [span], "head": span, "micro_batches": 1, "h2d_bytes_per_second": 1e9,
                                 "d2h_bytes_per_second": 1e9, "both_bytes_per_second": 1.5e9}}, open(options["--json"], "w"))
"""


class Configurations(unittest.TestCase):
    def test_keys_are_set_where_they_belong(self):
        text = "[moe]\nexperts = 8\n\n[train]\nbatch = 2\n"
        made = tomllib.loads(load("experts").with_keys(text, {("moe", "experts"): 16, ("train", "clip_norm"): 0.0,
                                                     ("train", "batch"): 5, ("lora", "rank"): 4}))
        self.assertEqual(made, {"moe": {"experts": 16}, "train": {"batch": 5, "clip_norm": 0.0}, "lora": {"rank": 4}})


class Verdicts(StandInBench):
    bench_name, trainer = "experts", TRAINER

    def run_bench(self, *more, **fakes):
        answer, rows = self.take_rows(*more, **fakes)
        return answer, {(row["case"], row["system"], row["metric"]): row for row in rows}

    def test_rows_and_floors(self):
        answer, rows = self.run_bench()
        self.assertEqual(answer.returncode, 0, answer.stderr)
        ratio = rows["experts@24", "terrace", "step_time_ratio_to_resident"]
        self.assertAlmostEqual(ratio["value"], 1.2)
        self.assertEqual(ratio["floor"], 1.0)  # 2 ms on the link in a step of 10
        self.assertAlmostEqual(rows["experts@96", "terrace", "stall_ms"]["value"], 1)
        self.assertEqual(rows["experts@96", "terrace", "by_router"]["value"], 1)
        self.assertEqual(rows["experts@96", "terrace", "break_even_share"]["value"], 0.5)
        self.assertAlmostEqual(rows["experts@96", "terrace", "router_stall_ms"]["value"], 2)
        # A step's 20 and 10 MB take 20 ms: the slower of one way alone and both together. 2 ms of forward, 4 of backward.
        self.assertAlmostEqual(rows["optimizer-clip", "terrace", "link_ms"]["value"], 20)
        self.assertAlmostEqual(rows["optimizer-clip", "terrace", "added_ms"]["floor"], 18)
        self.assertAlmostEqual(rows["optimizer-no-clip", "terrace", "added_ms"]["floor"], 14)
        self.assertAlmostEqual(rows["optimizer-no-clip", "terrace", "added_ratio_to_floor"]["value"], 2 / 14)

    def test_every_way_of_loading(self):
        answer, rows = self.run_bench("--part", "idle")
        self.assertEqual(answer.returncode, 0, answer.stderr)
        self.assertEqual({system for _, system, _ in rows}, {"resident", "by-layer", "by-router", "terrace"})
        self.assertEqual(rows["idle", "by-layer", "fetched_bytes"]["value"], 2e6)
        config = tomllib.loads((self.folder / "out" / "idle.toml").read_text(encoding="utf-8"))
        self.assertEqual((config["moe"]["experts"], config["train"]["length"]), (64, 12))
        answer, _ = self.run_bench("--part", "idle", FAKE_OTHER_BITS="1")
        self.assertIn("idle: losses differ", answer.stderr)

    def test_a_model_that_is_larger_than_its_budget(self):
        answer, rows = self.run_bench("--part", "larger")
        self.assertEqual(answer.returncode, 0, answer.stderr)
        weights = 3 * 4 * 24 * 256 * 32 * 48  # three matrices of fp32 in each expert of each layer
        self.assertEqual(rows["larger", "terrace", "hbm_peak_bytes"]["floor"], weights // 4)
        self.assertEqual(rows["larger", "terrace", "weights_to_budget"]["value"], (1 << 30) / (weights // 4))
        for fake, value, said in (("FAKE_PEAK", weights // 4 + 1, "above the budget"), ("FAKE_OTHER_BITS", 1, "larger: losses differ"),
                                  ("FAKE_EXPERTS", weights - 4, "not four times the budget")):
            answer, _ = self.run_bench("--part", "larger", **{fake: str(value)})
            self.assertEqual(answer.returncode, 1, fake)
            self.assertIn(said, answer.stderr)

    def test_one_load_alone(self):
        _, rows = self.run_bench("--part", "experts", "--tokens-per-expert", "96")
        self.assertEqual({case for case, _, _ in rows}, {"experts@96"})

    def test_other_bits(self):
        answer, _ = self.run_bench(FAKE_OTHER_BITS="1")
        self.assertEqual(answer.returncode, 1)
        self.assertIn("experts@24: losses differ", answer.stderr)


if __name__ == "__main__":
    unittest.main()
