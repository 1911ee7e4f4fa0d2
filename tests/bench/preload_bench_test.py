"""The floor that bench/preload.py prints, and what it makes of runs that differ or fail. No script runs here."""

import contextlib
import io
import json
import sys
import time
import unittest
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
import preload  # noqa: E402

TIMES = {"forward": 0.2, "backward": 0.4, "update": 0.1}
RATES = {"d2h": 50e9, "h2d": 50e9, "both": 80e9}


class Floor(unittest.TestCase):
    def test_what_fits_the_passes_costs_nothing(self):
        self.assertAlmostEqual(preload.floor_seconds(TIMES, 0, 0, RATES), 0.7)
        self.assertAlmostEqual(preload.floor_seconds(TIMES, 10e9, 0, RATES), 0.7)

    def test_forward_is_the_first_to_be_too_short(self):
        self.assertAlmostEqual(preload.floor_seconds(TIMES, 15e9, 0, RATES), 0.3 + 0.4 + 0.1)
        self.assertAlmostEqual(preload.floor_seconds(TIMES, 25e9, 0, RATES), 0.5 + 0.5 + 0.1)

    def test_what_the_optimizer_keeps_may_leave_while_it_updates(self):
        self.assertAlmostEqual(preload.floor_seconds(TIMES, 15e9, 5e9, RATES), 0.7)
        self.assertAlmostEqual(preload.floor_seconds(TIMES, 15e9, 2.5e9, RATES), 0.75)
        last = 0
        for absent in range(0, 60):
            seconds = preload.floor_seconds(TIMES, absent * 1e9, 20e9, RATES, parts=16)
            self.assertGreaterEqual(seconds, last)
            last = seconds


class Rows(unittest.TestCase):
    def rows(self, run, part, **more):
        options = SimpleNamespace(build=Path("."), device="cuda", clients=None, python="python", allocator="native", case="gpt-plain",
                                  tier="auto", pairs=3, deterministic=more.pop("deterministic", False), quick=True, jobs=more.pop("jobs", 1), size=None,
                                  steps=None)
        bench = preload.Bench(options)
        bench.run = run
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            getattr(bench, part)()
        return bench, [json.loads(line) for line in out.getvalue().splitlines()]

    @staticmethod
    def answer(ms, losses):
        return {"ms_per_step": ms, "losses": losses, "peak_bytes": 100 << 20, "state_bytes": 0, "rates": RATES,
                "times": {phase: 1e3 * seconds for phase, seconds in TIMES.items()}}

    def test_pairs_take_turns_and_give_the_median(self):
        calls = []
        times = iter([10, 12, 12, 10, 10, 30])

        def run(case, more=(), budget=None, tier="hbm", through=()):
            if through == preload.PHASES:
                return self.answer(10, ["a"])
            calls.append(budget is None)
            return self.answer(next(times), ["a"])

        _, rows = self.rows(run, "idle")
        self.assertEqual(calls, [True, False, False, True, True, False])
        self.assertEqual([(row["metric"], row["value"]) for row in rows], [("step_time_ratio", 1.2)])

    def test_a_peer_takes_its_turn_and_all_run_the_same_kernels(self):
        calls = []
        times = {"gpt-save_on_cpu": iter([50, 40, 90]), True: iter([10, 10, 10]), False: iter([20, 14, 11])}

        def run(case, more=(), budget=None, tier="hbm", through=()):
            calls.append((case, budget is None, *more))
            return self.answer(10 if through == preload.PHASES else next(times[case if case in times else budget is None]), ["a"])

        with mock.patch.object(preload, "PRESSURE", (("gpt-plain", 28, 0.5),)):
            _, rows = self.rows(run, "pressure", deterministic=True)
        self.assertEqual({call[2:] for call in calls}, {("--deterministic",)})
        first = [calls[1 + 3 * turn][:2] for turn in range(3)]
        self.assertEqual(sorted(first), [("gpt-plain", False), ("gpt-plain", True), ("gpt-save_on_cpu", True)])
        values = {(row["system"], row["metric"]): row["value"] for row in rows}
        self.assertEqual(values["save_on_cpu", "ms_per_step"], 50)
        self.assertEqual(values["terrace", "ms_per_step"], 14)
        self.assertEqual(values["terrace", "step_time_ratio"], 1.4)

    def test_one_takes_its_steps_while_the_next_have_begun(self):
        begun, stepped, deadline = [], [], time.monotonic() + 30

        def run(case, more=(), budget=None, tier="hbm", through=()):
            if through == preload.PHASES:
                return self.answer(10, ["a"])
            _, mine, following = through
            begun.append(mine)
            while not Path(mine).exists() or (len(begun) < 3 and time.monotonic() < deadline):
                time.sleep(0.001)
            stepped.append((int(Path(mine).name), len(begun)))
            self.assertFalse(Path(following).exists())
            return self.answer(10, ["a"])

        _, rows = self.rows(run, "idle", jobs=3)
        self.assertEqual([at for at, _ in stepped], list(range(6)), "in their order")
        self.assertGreaterEqual(stepped[0][1], 3, "others had begun by then")
        self.assertEqual(len(rows), 1)

    def test_where_one_fails_no_other_begins(self):
        begun = []

        def run(case, more=(), budget=None, tier="hbm", through=()):
            if through == preload.PHASES:
                return self.answer(10, ["a"])
            begun.append(through)
            return {}

        _, rows = self.rows(run, "idle")
        self.assertEqual((len(begun), rows), (1, []))

    def test_another_loss_is_a_failure(self):
        def run(case, more=(), budget=None, tier="hbm", through=()):
            return self.answer(10, ["a"] if budget is None or budget > 50 << 20 else ["b"])

        bench, rows = self.rows(run, "bits")
        self.assertEqual([(row["case"], row["value"]) for row in rows],
                         [("gpt-plain@200%", 1), ("gpt-plain@80%", 1), ("gpt-plain@60%", 1), ("gpt-plain@40%", 0)])
        self.assertTrue(bench.bad)

    def test_a_script_that_fails_has_no_row_and_is_named(self):
        ended = SimpleNamespace(returncode=1, stdout="", stderr="terrace: a line of ours\nRuntimeError: what went wrong\n")
        said = io.StringIO()
        with mock.patch.object(preload.subprocess, "run", lambda *_, **__: ended), contextlib.redirect_stderr(said):
            options = SimpleNamespace(build=Path("."), device="cuda", clients=None, python="python", allocator="native",
                                      case="gpt-plain", tier="auto", pairs=1, deterministic=False, quick=True, jobs=1,
                                      size=None, steps=None)
            bench = preload.Bench(options)
            bench.idle()
        self.assertTrue(bench.bad)
        self.assertIn("gpt-plain failed with exit code 1", said.getvalue())
        self.assertIn("preload: RuntimeError: what went wrong\n", said.getvalue())


if __name__ == "__main__":
    unittest.main()
