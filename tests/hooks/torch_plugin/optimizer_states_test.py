"""Optimizer state in DDR between updates: the same weights, state that is whole whenever somebody looks."""

import copy
import gc
import io
import unittest

import torch

import models
from terrace.torch.torch_versions import revive, storage_of
from terrace.torch.travellers import ALL

OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "adamw, one tensor at a time": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
    "adam, amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    "sgd with momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
}


def layers():
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))


def update(model, optimizer, times=1):
    for _ in range(times):
        model(torch.ones(8, 64)).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def state_of(optimizer):
    return [v.clone() for values in optimizer.state_dict()["state"].values() for v in values.values()
            if isinstance(v, torch.Tensor)]


class OptimizerStates(unittest.TestCase):
    def test_trainings_have_the_same_bits(self):
        for name, optimizer in OPTIMIZERS.items():
            plain = models.train(optimizer=optimizer)
            for budget in (200_000, 0):
                with models.plugin(saved_budget=budget, optimizer="ddr") as plugin:
                    self.assertTrue(models.same(models.train(optimizer=optimizer), plain), f"{name}, {budget}")
                    figures = plugin.figures()
                self.assertGreater(figures["state_bytes"], 0, name)
                self.assertEqual(figures["failures"], {})

    def test_they_leave_where_room_is_short_and_nothing_that_is_saved_is_seen(self):
        def train():
            with torch.autograd.graph.save_on_cpu():
                return models.train()

        plain = train()
        for short in (False, True):
            with models.plugin(saved_budget=1 << 40, optimizer="auto") as plugin:
                plugin.ledger_of(torch.device("cpu")).budget.lacks_room_unseen = lambda short=short: short
                self.assertTrue(models.same(train(), plain))
                self.assertEqual(plugin.figures()["state_bytes"] > 0, short)

    def test_updates_in_slices_have_the_same_bits_and_stay_within_the_room(self):
        for name in ("adamw", "sgd with momentum"):
            optimizer = OPTIMIZERS[name]
            plain = models.train(optimizer=optimizer)
            whole = 0
            for room in (1 << 40, 0):
                with models.plugin(saved_budget=1 << 40, optimizer="ddr", update_room=room) as plugin:
                    most = [0]
                    spied = plugin.states._send

                    def send(opt, parameters, spied=spied, most=most):
                        here = sum(v.numel() * v.element_size() for values in opt.state.values()
                                   for v in values.values() if isinstance(v, torch.Tensor))
                        most[0] = max(most[0], here)
                        spied(opt, parameters)

                    plugin.states._send = send
                    self.assertTrue(models.same(models.train(optimizer=optimizer), plain), f"{name}, {room}")
                    self.assertEqual(plugin.figures()["failures"], {})
                whole = max(whole, most[0])
                if room == 0:
                    self.assertLess(most[0], whole / 2, f"{name}: all of it was there at one time")

    def test_a_step_with_hooks_or_a_closure_is_never_cut(self):
        with models.plugin(saved_budget=1 << 40, optimizer="ddr", update_room=0):
            model = layers()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            calls = []

            def closure():
                calls.append(1)
                optimizer.zero_grad()
                loss = model(torch.ones(8, 64)).pow(2).sum()
                loss.backward()
                return loss

            self.assertIsInstance(optimizer.step(closure), torch.Tensor)
            self.assertEqual(len(calls), 1)
            if hasattr(optimizer, "register_step_pre_hook"):
                optimizer.register_step_pre_hook(lambda *unused: calls.append(2))
                optimizer.step()
                self.assertEqual(calls, [1, 2])

    def test_state_that_left_is_no_longer_in_memory(self):
        with models.plugin(saved_budget=0, optimizer="ddr") as plugin:
            model = layers()
            optimizer = torch.optim.AdamW(model.parameters())
            model(torch.ones(8, 64)).sum().backward()
            optimizer.step()
            moments = [v for values in optimizer.state.values() for v in values.values()
                       if isinstance(v, torch.Tensor) and v.numel() >= 64 * 64]
            self.assertEqual(len(moments), 8)
            weak = [storage_of(v)._weak_ref() for v in moments if v.numel()]
            for ledger in plugin._ledgers.values():
                ledger.states.release(ALL)
            self.assertEqual([revive(w) for w in weak], [None] * len(weak))
            self.assertTrue(all(v.numel() == 0 for v in moments))
            optimizer.state_dict()
            self.assertTrue(all(v.shape == (64, 64) for v in moments))

    def test_who_looks_sees_it_whole(self):
        def run():
            model = layers()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            update(model, optimizer, 2)
            first = state_of(optimizer)
            saved = io.BytesIO()
            torch.save(optimizer.state_dict(), saved)
            update(model, optimizer)
            other_model = copy.deepcopy(model)
            other = torch.optim.AdamW(other_model.parameters(), lr=1e-2)
            saved.seek(0)
            other.load_state_dict(torch.load(saved))
            update(other_model, other, 2)
            update(model, optimizer)
            return first + state_of(other) + state_of(optimizer) + list(model.parameters())

        plain = [t.detach() for t in run()]
        with models.plugin(saved_budget=0, optimizer="ddr") as plugin:
            self.assertTrue(models.same([t.detach() for t in run()], plain))
            self.assertGreater(plugin.figures()["state_bytes"], 0)

    def test_an_optimizer_that_dies_gives_its_state_back(self):
        with models.plugin(saved_budget=0, optimizer="ddr") as plugin:
            model = layers()
            optimizer = torch.optim.AdamW(model.parameters())
            update(model, optimizer)
            self.assertGreater(plugin.figures()["entries"], 0)
            del optimizer
            gc.collect()
            self.assertEqual(plugin.figures()["entries"], 0)

    def test_a_step_that_fails_leaves_state_that_works(self):
        with models.plugin(saved_budget=0, optimizer="ddr"):
            model = layers()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            update(model, optimizer)

            def closure():
                raise KeyError("in the closure")

            with self.assertRaises(KeyError):
                optimizer.step(closure)
            update(model, optimizer)
            got = [p.detach().clone() for p in model.parameters()]
        plain = layers()
        update(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2), 2)
        self.assertTrue(models.same(got, [p.detach() for p in plain.parameters()]))

    def test_two_optimizers_in_turns(self):
        def run():
            left, right = layers(), layers()
            optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (left, right)]
            for turn in range(5):
                update((left, right)[turn % 2], optimizers[turn % 2])
            return [p.detach().clone() for m in (left, right) for p in m.parameters()]

        plain = run()
        with models.plugin(saved_budget=0, optimizer="ddr"):
            self.assertTrue(models.same(run(), plain))

    def test_it_stays_where_the_policy_says_nothing(self):
        with models.plugin(saved_budget=0) as plugin:
            model = layers()
            update(model, torch.optim.AdamW(model.parameters()), 2)
            self.assertEqual(plugin.figures()["state_bytes"], 0)
        for owner in (torch.optim.AdamW, torch.optim.SGD):
            self.assertFalse(hasattr(owner.step, "_terrace"), "the end puts back what was there")


if __name__ == "__main__":
    torch.set_num_threads(1)
    unittest.main()
