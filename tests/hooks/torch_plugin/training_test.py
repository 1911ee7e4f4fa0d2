"""Whole trainings under budgets: the same bits as without Terrace, really spilled, within the budget."""

import unittest

import torch

import models

CASES = {
    "gpt": {},
    "gpt, checkpoint": {"model_options": {"checkpointed": "plain"}, "steps": 2},
    "gpt, reentrant checkpoint": {"model_options": {"checkpointed": "reentrant"}, "steps": 2},
    "gpt, autocast": {"autocast": True, "steps": 2},
    "gpt, gradient accumulation": {"micro_batches": 3, "steps": 2},
    "moe": {"model_options": {"kind": "moe"}},
    "moe, checkpoint": {"model_options": {"kind": "moe", "checkpointed": "plain"}, "steps": 2},
}


class Training(unittest.TestCase):
    def check(self, name):
        options = CASES[name]
        plain = models.train(**options)
        with models.plugin(saved_budget=1 << 40) as plugin:
            self.assertTrue(models.same(models.train(**options), plain))
            whole = plugin.figures()
        self.assertEqual(whole["spilled_bytes"], 0, "all fits")
        self.assertGreater(whole["held_peak"], 0)
        last = 0
        for share in (80, 60, 40, 0) if name in ("gpt", "moe") else (60, 0):
            budget = whole["held_peak"] * share // 100
            with models.plugin(saved_budget=budget) as plugin:
                self.assertTrue(models.same(models.train(**options), plain), f"{name} at {share}%")
                figures = plugin.figures()
            self.assertLessEqual(figures["held_peak"], budget, f"{name} at {share}%")
            self.assertGreaterEqual(figures["restored_bytes"], last, "less HBM, more travels")
            self.assertGreater(figures["spilled_bytes"], 0)
            self.assertEqual((figures["held"], figures["entries"], figures["failures"]), (0, 0, {}))
            last = figures["restored_bytes"]
        self.assertGreater(last, 0)

    def test_a_round_that_is_known_moves_what_must_and_waits_for_nothing(self):
        """With the schedule, the last rounds spill what does not fit and no more, and restores are ahead of use."""
        with models.plugin(saved_budget=1 << 40) as plugin:
            models.train(steps=1)
            peak = plugin.figures()["held_peak"]
        with models.plugin(saved_budget=peak // 2) as plugin:
            models.train(steps=2)
            two = plugin.figures()["spilled_bytes"]
        with models.plugin(saved_budget=peak // 2) as plugin:
            models.train(steps=6)
            six = plugin.figures()
        each = (six["spilled_bytes"] - two) / 4
        self.assertLess(each, peak * 0.55)
        self.assertGreaterEqual(each, peak * 0.45)
        self.assertEqual(six["changes"], 0)

    def test_evaluation_and_other_shapes_between(self):
        def alternate():
            torch.manual_seed(0)
            model = models.Model()
            seen = []
            for step in range(6):
                time = 32 if step % 2 else 24
                data = torch.randint(0, 128, (2, time + 1), generator=torch.Generator().manual_seed(step))
                loss = model(data[:, :-1], data[:, 1:])
                loss.backward()
                seen.append(loss.detach().clone())
                with torch.no_grad():
                    seen.append(model(data[:, :-1], data[:, 1:]))
                forgotten = model(data[:, :-1], data[:, 1:])  # with a graph, and no backward
                seen.append(forgotten.detach().clone())
                del loss, forgotten
            return seen + [p.grad for p in model.parameters()]

        plain = alternate()
        with models.plugin(saved_budget=200_000) as plugin:
            self.assertTrue(models.same(alternate(), plain))
            figures = plugin.figures()
        self.assertGreater(figures["restored_bytes"], 0)
        self.assertLessEqual(figures["held_peak"], 200_000)
        self.assertGreaterEqual(figures["changes"], 1)
        self.assertEqual(figures["entries"], 0)


for number, case in enumerate(CASES):
    setattr(Training, f"test_{number}_" + case.replace(", ", "_").replace(" ", "_"),
            lambda self, case=case: self.check(case))

if __name__ == "__main__":
    torch.set_num_threads(1)
    unittest.main()
