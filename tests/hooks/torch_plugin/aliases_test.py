"""Tensors that show the bytes of state, gradients or weights: what is written through one is read through the other."""

import io
import unittest
from unittest import mock

import torch

import models
from stack import BATCH, LAYER, WEIGHTS, WIDTH, adamw, away, budget, layers, ledger, train, whole_weights
from terrace.torch import optimizer_slices
from terrace.torch.torch_versions import storage_of
from terrace.torch.travellers import ALL


class Manual(torch.optim.Optimizer):
    """With state of its own making, for each parameter."""

    def __init__(self, parameters, make, update):
        super().__init__(parameters, {})
        self._make, self._update = make, update

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if not self.state[p]:
                    self.state[p].update(self._make(p))
                self._update(p, self.state[p])


def masters(parameters):
    """Updates a tensor that is the parameter under another name."""

    def update(p, state):
        state["master"].add_(p.grad, alpha=-0.1)

    return Manual(parameters, lambda p: {"master": p.detach()}, update)


def flat_and_shaped(parameters):
    """Writes state as one tensor and reads it as another."""

    def make(p):
        shaped = torch.zeros_like(p)
        return {"shaped": shaped, "flat": shaped.view(-1)}

    def update(p, state):
        state["flat"].mul_(0.9).add_(p.grad.view(-1))
        p.add_(state["shaped"], alpha=-0.1)

    return Manual(parameters, make, update)


def let_go(plugin):
    """What is on its way out has left."""
    if plugin is not None:
        with ledger(plugin).lock:
            ledger(plugin).states.release(ALL)


def both_ways(run, **options):
    """Without the plugin and with it, where it moves what it can."""
    plain = run(None)
    with models.plugin(saved_budget=1 << 40, optimizer="ddr", **options) as plugin:
        return plain, run(plugin), plugin.figures()


class State(unittest.TestCase):
    def test_that_shares_its_memory_is_one_and_the_same(self):
        for make in (masters, flat_and_shaped):
            def run(plugin):
                model = layers()
                optimizer = make(model.parameters())
                seen = []
                for _ in range(6):
                    loss = model(BATCH).pow(2).mean()
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=True)
                    let_go(plugin)
                    seen.append(loss.detach().clone())
                return seen + whole_weights(model)

            plain, got, figures = both_ways(run)
            self.assertTrue(models.same(got, plain), make.__name__)
            self.assertGreater(figures["entries"] + figures["spilled_bytes"], 0, "it was tried")
            self.assertEqual(figures["failures"], {})

    def test_that_shares_its_memory_is_not_copied_in_vain_again_and_again(self):
        with models.plugin(saved_budget=1 << 40, optimizer="ddr") as plugin:
            model = layers()
            optimizer = masters(model.parameters())
            spilled = []
            for _ in range(16):
                model(BATCH).sum().backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                let_go(plugin)
                spilled.append(plugin.figures()["spilled_bytes"])
            times = sum(before != after for before, after in zip([0] + spilled, spilled))
            self.assertLess(times, 8)
            for values in optimizer.state.values():
                values["master"] = torch.zeros(WIDTH, WIDTH)  # from here on its own
                values["master"].grad = None
            before = plugin.figures()["state_bytes"]
            for _ in range(2):
                model(BATCH).sum().backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                let_go(plugin)
            self.assertGreater(plugin.figures()["state_bytes"], before)

    def test_a_state_dict_that_somebody_keeps_shows_the_state_of_now(self):
        def run(plugin):
            model = layers()
            optimizer = adamw(model)
            train(model, optimizer, 2)
            kept = optimizer.state_dict()
            train(model, optimizer, 2)
            let_go(plugin)
            saved = io.BytesIO()
            torch.save(kept, saved)
            saved.seek(0)
            seen = [values[name] for values in torch.load(saved)["state"].values() for name in ("exp_avg", "exp_avg_sq")]
            del kept
            train(model, optimizer, 2)
            let_go(plugin)
            if plugin is not None:
                self.assertEqual({values["exp_avg"].numel() for values in optimizer.state.values()}, {0})
            return seen + whole_weights(model)

        plain, got, _ = both_ways(run)
        self.assertTrue(models.same(got, plain))


class Unseen(torch.optim.Optimizer):
    """Writes weights and state, as fused kernels do in some releases, without their versions showing it."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                momentum = self.state[p].setdefault("momentum", torch.zeros(p.shape))
                weight, momentum = torch.Tensor.detach(p).numpy(), momentum.numpy()
                momentum *= 0.9
                momentum += p.grad.numpy()
                weight -= 0.1 * momentum


class Updates(unittest.TestCase):
    def test_that_no_version_shows(self):
        def run():
            model = layers()
            return train(model, Unseen(model.parameters()), 5)

        plain = run()
        for elementwise in (set(), {Unseen}):  # as a whole, and in runs
            with mock.patch.object(optimizer_slices, "ELEMENTWISE", elementwise):
                for share in (100, 150, 250):
                    with budget(WEIGHTS * share // 100) as plugin:
                        self.assertTrue(models.same(run(), plain), (elementwise, share))
                        self.assertGreater(plugin.figures()["weight_bytes"] + plugin.figures()["state_bytes"], 0)


class Gradients(unittest.TestCase):
    def test_one_whose_memory_others_show_stays(self):
        def run(plugin):
            model = layers()
            model(BATCH).sum().backward()
            views = [p.grad.view(-1) for p in model.parameters()]
            model(BATCH).sum().backward()
            let_go(plugin)
            for view in views:
                view.mul_(2)
            return [p.grad.clone() for p in model.parameters()]

        plain, got, _ = both_ways(run, gradients="ddr")
        self.assertTrue(models.same(got, plain))


class Weights(unittest.TestCase):
    TIERS = ("ddr", None)

    def test_a_state_dict_is_written_to(self):
        for tier in self.TIERS:
            with budget(4 * LAYER, tier=tier) as plugin:
                model = layers()
                self.assertGreater(away(model), 0)
                own = model.state_dict()
                for index, name in enumerate(own):
                    own[name].copy_(torch.full((WIDTH, WIDTH), float(index)))
                del own
                model(BATCH)
                self.assertGreater(plugin.figures()["weight_bytes"], 0)
                for index, weight in enumerate(whole_weights(model)):
                    self.assertTrue((weight == index).all(), index)

    def test_a_state_dict_that_somebody_keeps_shows_the_weights_of_now(self):
        def run():
            model = layers()
            optimizer = adamw(model)
            train(model, optimizer, 1)
            kept = model.state_dict()
            train(model, optimizer, 2)
            return [value.clone() for value in kept.values()]

        plain = run()
        for tier in self.TIERS:
            with budget(6 * LAYER if tier else 14 * LAYER, tier=tier) as plugin:
                self.assertTrue(models.same(run(), plain))
                self.assertEqual(plugin.figures()["failures"], {})

    def test_one_that_was_kept_leaves_again_with_what_it_has_become(self):
        with budget(WEIGHTS) as plugin:
            model = layers(range(8))
            model(BATCH)
            for _ in range(40):
                kept = model[0].weight.data  # a counter of its own
                for _ in range(2):
                    model(BATCH)
                kept.add_(1)
                expected = kept.clone()
                del kept
                for _ in range(2):
                    model(BATCH)
                self.assertTrue(torch.equal(model[0].weight.detach(), expected))
            for _ in range(80):
                model(BATCH)
                if storage_of(torch.Tensor.detach(model._modules["0"]._parameters["weight"])).nbytes() < LAYER:
                    break
            else:
                self.fail("it never left again")
            self.assertTrue(torch.equal(model[0].weight.detach(), expected))
            self.assertEqual(plugin.figures()["failures"], {})


if __name__ == "__main__":
    torch.set_num_threads(1)
    unittest.main()
