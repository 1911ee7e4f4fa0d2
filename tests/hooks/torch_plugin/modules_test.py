"""Modules that are converted, loaded and copied while their weights may be away."""

import copy
import io
import unittest
from unittest import mock

import torch
from torch import nn

import models
from stack import LAYER, WIDTH, away, budget
from terrace.torch.parameters import Parameters
from terrace.torch.travellers import Travellers


class Block(nn.Module):
    """A parameter of its own beside a child's, as nn.MultiheadAttention has."""

    def __init__(self):
        super().__init__()
        self.own = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)


class Wide(nn.Module):
    """More parameters of its own than the budget has room for."""

    def __init__(self):
        super().__init__()
        for index in range(12):
            self.register_parameter(f"w{index}", nn.Parameter(torch.randn(WIDTH, WIDTH)))


def some_of(kind):
    torch.manual_seed(0)
    return nn.Sequential(*(kind() for _ in range(3)))


def whole(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


class Modules(unittest.TestCase):
    KINDS = (Block, Wide, lambda: nn.MultiheadAttention(WIDTH, 4))

    def assert_same(self, got, expected):
        wrong = [name for name, value in expected.items() if not torch.equal(got[name], value)]
        self.assertEqual(wrong, [])

    def test_each_weight_is_whole_when_it_is_converted(self):
        for kind in self.KINDS:
            for change in (nn.Module.double, lambda m: m.to(torch.bfloat16)):
                expected = whole(change(some_of(kind)))
                for tier in ("ddr", None) if kind is Block else ("ddr",):
                    with budget(4 * LAYER, tier=tier) as plugin:
                        self.assert_same(whole(change(some_of(kind))), expected)
                        self.assertGreater(plugin.figures()["weight_bytes"], 0)

    def test_each_weight_is_whole_when_it_is_loaded(self):
        for kind in self.KINDS:
            with torch.no_grad():
                source = {name: value * 3 for name, value in whole(some_of(kind)).items()}
            with budget(4 * LAYER) as plugin:
                model = some_of(kind)
                model.load_state_dict(source)
                # A module's own are in a list while it is loaded, and stay: 12 at most.
                self.assertLessEqual(plugin.figures()["hbm_peak_bytes"], 18 * LAYER)
                self.assert_same(whole(model), source)
            del model

    def test_copied_and_unpickled_ones_are_known(self):
        def unpickled():
            file = io.BytesIO()
            torch.save(some_of(Block), file)
            file.seek(0)
            return torch.load(file, weights_only=False)

        def from_meta():
            model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False, device="meta") for _ in range(4)))
            return model.to_empty(device="cpu")

        for make in (lambda: copy.deepcopy(some_of(Block)), unpickled, from_meta,
                     lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 4, 256), 3),
                     lambda: copy.deepcopy(nn.LSTM(WIDTH, WIDTH))):
            with models.plugin(saved_budget=1 << 40):
                model = make()
                known = {id(p) for p in Parameters.alive()}
                self.assertEqual([name for name, p in model.named_parameters() if id(p) not in known], [])
                for module in model.modules():
                    for parameter in module._parameters.values():
                        if isinstance(module, nn.RNNBase) and parameter is not None:
                            self.assertIn(parameter, Parameters.held_elsewhere)

    def test_lazy_ones_are_made_as_ever(self):
        def run():
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LazyLinear(WIDTH), nn.LazyLinear(WIDTH)).double()
            model(torch.ones(2, WIDTH).double()).sum().backward()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(3):
                optimizer.step()
                model(torch.ones(2, WIDTH).double()).sum().backward()
            return list(whole(model).values())

        plain = run()
        for tier in ("ddr", None):
            with budget(2 * LAYER, tier=tier) as plugin:
                self.assertTrue(models.same(run(), plain))
                self.assertEqual(plugin.figures()["failures"], {})

    def test_scripted_ones_are_converted_and_copied_as_ever(self):
        def run():
            torch.manual_seed(0)
            model = torch.jit.script(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)))
            twin = copy.deepcopy(model.double())
            return [twin(torch.ones(1, WIDTH).double()), *whole(model).values()]

        plain = run()
        with budget(2 * LAYER):
            self.assertTrue(models.same(run(), plain))

    def test_copies_move_when_they_are_used(self):
        source = some_of(Block)
        expected = whole(source)
        with budget(3 * LAYER) as plugin:
            model = copy.deepcopy(source)
            for module in model:
                module.out(torch.ones(1, WIDTH))
            self.assertGreater(away(model), 0)
            self.assert_same(whole(model), expected)
            self.assertEqual(plugin.figures()["failures"], {})

    def test_those_that_are_gone_are_forgotten(self):
        with models.plugin(saved_budget=1 << 40):
            for _ in range(200):
                nn.Linear(8, 8)
            self.assertLess(len(Parameters.all), 200)
            kept = some_of(Block)
            for _ in range(200):
                kept.to(torch.float32)
            self.assertLess(len(Parameters.all), 200)

    def test_those_made_in_inference_mode_stay(self):
        def run():
            with torch.inference_mode():
                model = some_of(Block)
                return [module.own @ module.out(torch.ones(1, WIDTH)).t() for module in model]

        plain = run()
        for tier in ("ddr", None):
            with budget(2 * LAYER, tier=tier) as plugin:
                outer = some_of(Block)  # as any other
                self.assertTrue(models.same(run(), plain))
                outer[0].out(torch.ones(1, WIDTH)).sum().backward()
                self.assert_same(whole(outer), whole(some_of(Block)))
                self.assertEqual(plugin.figures()["failures"], {})
                self.assertGreater(plugin.figures()["weight_bytes"], 0)

    def test_a_want_of_room_that_cannot_be_helped_is_not_the_programs(self):
        def fails(*unused, **options):
            raise RuntimeError("no such thing")

        with budget(2 * LAYER) as plugin:
            expected = whole(some_of(Block))
            with mock.patch.object(Travellers, "send", fails):
                model = some_of(Block)
                for module in model:
                    module.out(torch.ones(1, WIDTH)).sum().backward()
            self.assert_same(whole(model), expected)
            self.assertGreater(plugin.figures()["failures"]["no_room_made"], 0)

    def test_parameters_copied_one_into_the_other_are_whole(self):
        with budget(4 * LAYER):
            model, other = some_of(Wide), some_of(Wide)
            expected = whole(other)
            with torch.no_grad():
                for parameter, source in zip(model.parameters(), other.parameters()):
                    parameter.copy_(source)
            self.assert_same(whole(model), expected)


if __name__ == "__main__":
    torch.set_num_threads(1)
    unittest.main()
