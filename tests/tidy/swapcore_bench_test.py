#!/usr/bin/env python3
"""bench/swapcore.py: the set that selective recomputation keeps, and what makes the bench fail, with a program that
stands in for the trainer."""
import itertools
import random
import unittest

from stand_in_trainer import StandInBench, load

TRAINER = """#!/usr/bin/env python3
import json, os, sys
options = dict(zip(sys.argv[1:], sys.argv[2:]))
policy = os.path.basename(options.get("--policy", ""))
if "--resume" in options and not os.path.exists(options["--resume"]):
    sys.exit("a turn goes on from the checkpoint of the one before")
if "--checkpoint" in options:
    open(options["--checkpoint"], "a").close()
if policy and policy == os.environ.get("FAKE_NO_ROOM"):
    sys.exit("out of HBM")
loss = 2.5 if policy != os.environ.get("FAKE_OTHER_BITS", "none") else 2.5000001
peak = min({"none": 1000, "full": 500}[options["--recompute"]] + 300 * ("--hbm" in options), int(options.get("--hbm", 1000)))
peak += int(os.environ.get("FAKE_OVERSHOOT", "0")) * ("--hbm" in options)
layer = {"forward_seconds": 1, "backward_seconds": 3, "forward_peak": 100, "backward_peak": 100}
snapshot = {"hbm_budget": 200, "layers": [layer], "head": layer,
            "sites": [{"layer": 0, "group": name, "bytes": size, "recompute_seconds": 1} for name, size in (("a.big", 90), ("b.small", 30))]}
json.dump({"ms_per_step": 10.0, "tokens_per_second": 100.0, "hbm_peak_bytes": peak, "ddr_peak_bytes": 7, "cache_hits": 1,
           "cache_misses": 2, "cache_late": 0, "cache_evictions": 0, "stall_seconds": 0.004, "losses": [3.0, 3.0, loss],
           "losses_hex": [l.hex() for l in (3.0, 3.0, loss)], "swapcore_snapshot": snapshot}, open(options["--json"], "w"))
"""


class Selective(unittest.TestCase):
    bench = load("swapcore")

    def saved(self, snapshot, groups):
        """Seconds, or None where they do not fit: every moment by itself."""
        layers, head, budget = snapshot["layers"], snapshot["head"], snapshot["hbm_budget"]
        kept = [site for site in snapshot["sites"] if site["group"] in groups]

        def fits(peak, end):
            held = sum(site["bytes"] for site in kept if site["layer"] < end)
            return held == 0 or peak + held <= budget

        if not all(fits(layer["forward_peak"], l + 1) and fits(layer["backward_peak"], l) for l, layer in enumerate(layers)):
            return None
        if not fits(max(head["forward_peak"], head["backward_peak"]), len(layers)):
            return None
        return sum(site["recompute_seconds"] for site in kept)

    def test_is_the_best_of_all_sets(self):
        for seed in range(60):
            draw = random.Random(seed)
            layers = [{"forward_peak": draw.randint(50, 150), "backward_peak": draw.randint(50, 200)} for _ in range(3)]
            names = [f"op{i}" for i in range(draw.randint(1, 7))]
            sites = [{"layer": l, "group": name, "bytes": draw.randint(0, 40), "recompute_seconds": draw.random()}
                     for name in names for l in range(3) if draw.random() < 0.8]
            snapshot = {"layers": layers, "head": {"forward_peak": 100, "backward_peak": 120}, "sites": sites,
                        "hbm_budget": draw.randint(100, 500)}
            offered = {site["group"] for site in sites if site["bytes"] > 0}
            useful = {**snapshot, "sites": [site for site in sites if site["bytes"] > 0]}
            sets = [groups for n in range(len(offered) + 1) for groups in itertools.combinations(sorted(offered), n)]
            best = max(value for value in (self.saved(useful, groups) for groups in sets) if value is not None)
            chosen = self.saved(useful, self.bench.best_whole_set(snapshot))
            self.assertIsNotNone(chosen, seed)
            self.assertAlmostEqual(chosen, best, msg=str(seed))


class Verdicts(StandInBench):
    bench_name, trainer = "swapcore", TRAINER

    def run_bench(self, *more, **fakes):
        answer, rows = self.take_rows(*more, **fakes)
        return answer, {(row["case"], row["metric"]): row["value"] for row in rows}

    def test_all_as_it_should_be(self):
        answer, rows = self.run_bench()
        self.assertEqual(answer.returncode, 0, answer.stderr)
        self.assertEqual({case for case, _ in rows}, {"none", "full", "swapcore@0", "swapcore@10", "swapcore@25", "swapcore@50",
                                                      "swapcore@75", "offload-all", "lru", "selective"})
        self.assertEqual(rows["swapcore@25", "hbm_budget_bytes"], 625)
        self.assertEqual(rows["lru", "hbm_budget_bytes"], 750)
        self.assertEqual(rows["lru", "step_time_ratio_to_full"], 1.0)
        self.assertAlmostEqual(rows["lru", "stall_ms"], 4 / 3)  # keeps from the first step on
        self.assertAlmostEqual(rows["swapcore@0", "stall_ms"], 4)  # from the third on
        kept = (self.folder / "out" / "selective.toml").read_text(encoding="utf-8")
        self.assertIn('match = "layer.*.b.small"', kept)  # 100 bytes are free: both do not fit
        self.assertNotIn("big", kept)

    def test_other_bits(self):
        answer, _ = self.run_bench(FAKE_OTHER_BITS="lru.toml")
        self.assertEqual(answer.returncode, 1)
        self.assertIn("lru: its losses of turn 1", answer.stderr)

    def test_over_the_budget(self):
        answer, _ = self.run_bench("--case", "swapcore@10", FAKE_OVERSHOOT="1")
        self.assertEqual(answer.returncode, 1)
        self.assertIn("above the budget of 550", answer.stderr)

    def test_what_does_not_fit_fails_and_the_others_have_rows(self):
        answer, rows = self.run_bench(FAKE_NO_ROOM="offload-all.toml")
        self.assertEqual(answer.returncode, 1)
        self.assertIn("offload-all: exit code", answer.stderr)
        self.assertIn(("selective", "ms_per_step"), rows)
        self.assertNotIn(("offload-all", "ms_per_step"), rows)

    def test_unknown_cases_are_answered_with_the_known(self):
        answer, _ = self.run_bench("--case", "swapcore@99")
        self.assertEqual(answer.returncode, 1)
        self.assertIn("swapcore@75", answer.stderr)


if __name__ == "__main__":
    unittest.main()
