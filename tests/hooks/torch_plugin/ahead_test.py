"""What is needed next is on its way before anybody asks for it, and what will leave before it has to."""

import unittest

import torch
from torch import nn

import models
from stack import BATCH, LAYER, WIDTH, adamw, budget, ledger
from terrace.torch.budget import FixedBudget

SIZE = 64 << 10  # bytes
LINKS = 8


class Look(torch.autograd.Function):
    """Calls, in backward, between what lies on either side."""

    @staticmethod
    def forward(ctx, tensor, call):
        ctx.call = call
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, grad):
        ctx.call()
        return grad, None


def chain(look_forward=lambda link: None, look_backward=lambda: None):
    """Saves one tensor for each link; the one that looks in backward comes after the last four of them."""
    x = torch.linspace(0, 1, SIZE // 4, requires_grad=True)
    y = x * 1
    for link in range(LINKS):
        if link == LINKS - 4:
            y = Look.apply(y, look_backward)
        y = (y * 1.1).sin()
        look_forward(link)
    y.sum().backward()


class Room(FixedBudget):
    """None in forward; in backward for all."""

    def limit(self, at):
        return 1 << 40 if at.in_backward else 0


class SavedTensors(unittest.TestCase):
    def test_backward_finds_the_next_ones_on_their_way(self):
        with models.plugin(saved_budget=0) as plugin:
            ledger(plugin).budget = Room(0, None)
            for _ in range(2):
                before, seen = plugin.figures()["restores"], []
                chain(look_backward=lambda: seen.append(plugin.figures()["restores"] - before))
                self.assertEqual(seen, [LINKS], "four have been read")

    def test_as_far_as_there_is_room(self):
        with models.plugin(saved_budget=2 * SIZE) as plugin:
            for _ in range(2):
                before, seen = plugin.figures()["restores"], []
                chain(look_backward=lambda: seen.append(plugin.figures()["restores"] - before))
                self.assertLess(seen[0], LINKS)
                self.assertLessEqual(plugin.figures()["held_peak"], 2 * SIZE)

    def test_those_that_the_plan_sends_begin_to_leave_as_they_are_saved(self):
        with models.plugin(saved_budget=6 * SIZE) as plugin:
            for turn in range(2):
                before, seen = plugin.figures()["spills"], []
                chain(lambda link: seen.append(plugin.figures()["spills"] - before))
                if turn:
                    # Two have no room, and the first two are read last. Six fit at a time, so none has to leave yet.
                    self.assertEqual(seen[:5], [1, 2, 2, 2, 2])

    def test_in_a_first_round_copies_begin_at_half_of_the_budget(self):
        with models.plugin(saved_budget=6 * SIZE) as plugin:
            seen = []
            chain(lambda link: seen.append(plugin.figures()["spills"]))
            self.assertEqual(seen[2], 0)
            self.assertGreater(seen[4], 0)


class Weights(unittest.TestCase):
    def test_those_used_next_the_last_time_are_on_their_way(self):
        deep = 40  # so that the next sixteen uses are not all there is
        with budget(deep * LAYER * 60 // 100) as plugin:
            model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(deep)))
            for module in model[:-1]:
                module.weight.requires_grad_(False)
            optimizer = adamw(model)
            for _ in range(3):
                model(BATCH).sum().backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            coming = []
            for module in model:
                module.register_forward_hook(lambda *_: coming.append(len(ledger(plugin).states.back)))
            model(BATCH).sum().backward()
            self.assertGreater(sum(coming), deep // 4)
            self.assertLessEqual(plugin.figures()["hbm_peak_bytes"], deep * LAYER * 60 // 100)


if __name__ == "__main__":
    torch.set_num_threads(1)
    unittest.main()
