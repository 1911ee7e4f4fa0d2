"""The plugin's end, rounds that have none of their own, and hooks that others put on top."""

import contextlib
import threading
import unittest
from unittest import mock

import torch
from torch import nn

import models
import terrace.torch.saved_tensors
from stack import BATCH, LAYERS, WEIGHTS, adamw, budget, layers, ledger, whole_weights
from terrace.torch import residency


class End(unittest.TestCase):
    def test_a_step_that_somebody_kept_goes_on_behind_it(self):
        def run(plugins):
            model = layers()
            optimizer = step = None
            seen = []
            for plugin in plugins:
                with plugin():
                    if optimizer is None:
                        optimizer = adamw(model)
                        step = optimizer.step  # as a scheduler keeps it
                    for _ in range(2):
                        seen.append(model(BATCH).pow(2).mean())
                        seen[-1].backward()
                        step()
                        optimizer.zero_grad(set_to_none=True)
                        seen[-1] = seen[-1].detach()
            return seen + whole_weights(model)

        def without():
            return mock.patch.dict({})

        def short():
            return budget(WEIGHTS)

        plain = run([without] * 3)
        for plugins in ([short, without, without], [short, without, short], [short, short, without]):
            self.assertTrue(models.same(run(plugins), plain), [p.__name__ for p in plugins])


class Idle(torch.optim.Optimizer):
    def step(self):
        pass


class Rounds(unittest.TestCase):
    """Where something that was saved lives on into the next step."""

    ROWS = 64

    def run_with(self, nbytes, survivor, steps=40):
        """Losses, and the plugin's ledger behind the last step."""

        def losses():
            teacher, student = layers(), layers()
            optimizer = torch.optim.SGD(student.parameters(), lr=1e-3)
            generator = torch.Generator().manual_seed(5)
            seen = []
            for _ in range(steps):
                batch = torch.randn(self.ROWS, 128, generator=generator)
                if survivor:
                    target = teacher(batch)  # the one before is let go behind it
                    loss = (student(batch) - target.detach()).pow(2).mean()
                else:
                    loss = student(batch).pow(2).mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                seen.append(loss.detach().clone())
            return seen, (target if survivor else None)

        plain, _ = losses()
        with models.plugin(saved_budget=nbytes) as plugin:
            got, kept = losses()
            self.assertTrue(models.same(got, plain))
            self.assertEqual(plugin.figures()["failures"], {})
            return plugin, ledger(plugin)

    def test_end_with_the_step_and_are_known(self):
        size = self.ROWS * 128 * 4
        for nbytes in (1 << 40, 12 * size, 4 * size):
            plugin, state = self.run_with(nbytes, survivor=True)
            self.assertGreater(state.rounds, 30)
            self.assertLess(len(state.schedule.known), 4, "they all go the same way in the end")
            self.assertLessEqual(len(state.schedule.known[0].sizes), 2 * LAYERS + 2)
            self.assertLess(state.schedule.changes, 4)
            self.assertLess(len(state._entries) + len(state._heap) + len(state._uncopied), 10 * LAYERS)

    def test_nothing_is_left_of_those_that_lived_on(self):
        for nbytes in (1 << 40, 0):
            with models.plugin(saved_budget=nbytes) as plugin:
                model = layers()
                optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
                kept = []
                for _ in range(12):
                    loss = model(BATCH).pow(2).mean()
                    loss.backward(retain_graph=True)
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=True)
                    kept = [loss, *kept[:2]]
                self.assertGreater(plugin.figures()["rounds"], 6)
                del kept, loss
                state = ledger(plugin)
                state.settle()
                figures = plugin.figures()
                self.assertEqual((figures["held"], figures["entries"], len(state._entries), state.standing().alive), (0, 0, 0, 0))
                self.assertTrue(state.between_rounds)
                self.assertEqual(len(state._by_storage), 0)

    def test_what_lived_on_is_read_with_the_same_bits(self):
        def run():
            model = layers(range(LAYERS))
            scale = nn.Parameter(torch.ones(128))
            optimizer = Idle([scale], {})
            kept, seen = [], []
            for _ in range(10):
                loss = model(BATCH * scale).pow(2).mean()
                kept.append(loss)
                if len(kept) > 3:
                    first = kept.pop(0)
                    seen.append(torch.autograd.grad(first, scale)[0])  # three steps later
                torch.autograd.grad(loss, scale, retain_graph=True)
                optimizer.step()
            return seen

        plain = run()
        for nbytes in (1 << 40, 3 * 8192, 0):
            with models.plugin(saved_budget=nbytes) as plugin:
                self.assertTrue(models.same(run(), plain))
                self.assertEqual(plugin.figures()["failures"], {})

    def test_without_updates_are_bounded(self):
        def losses():
            teacher, student = layers(), layers()
            seen, target = [], None
            for _ in range(40):
                target = teacher(BATCH * 2)
                loss = (student(BATCH * 3) - target.detach()).pow(2).mean()
                loss.backward()
                seen += [loss.detach().clone()] + [p.grad.clone() for p in student.parameters()]
                student.zero_grad(set_to_none=True)
            return seen

        plain = losses()
        with mock.patch.object(residency, "MOST_SAVES", 64):
            for nbytes in (1 << 40, 5 * 8192, 0):
                with models.plugin(saved_budget=nbytes) as plugin:
                    self.assertTrue(models.same(losses(), plain))
                    self.assertLessEqual(len(ledger(plugin).schedule.sizes), 64)
                    self.assertGreater(ledger(plugin).rounds, 5)
                    self.assertEqual(plugin.figures()["failures"], {})

    def test_with_several_updates_go_to_their_own_end(self):
        """As with two networks that train each other: one graph is finished behind the other's update."""
        with models.plugin(saved_budget=0) as plugin:
            first, second = layers(), layers()
            optimizers = [torch.optim.SGD(m.parameters(), lr=1e-3) for m in (first, second)]
            for _ in range(6):
                made = first(BATCH)
                second(made.detach()).pow(2).mean().backward()
                optimizers[1].step()
                second(made).pow(2).mean().backward()
                optimizers[0].step()
                for optimizer in optimizers:
                    optimizer.zero_grad(set_to_none=True)
            self.assertEqual(ledger(plugin).rounds, 6)


_plain_bootstrap = threading.Thread._bootstrap_inner


class Stack:
    """PyTorch's stack of default hooks, as those releases have it that tell what is on top."""

    def __init__(self, hooks):
        self.hooks = hooks

    @contextlib.contextmanager
    def played(self):
        names = {"push_default_hooks": lambda pack, unpack: self.hooks.append((pack, unpack)),
                 "pop_default_hooks": self.hooks.pop,
                 "top_default_hooks": lambda: self.hooks[-1] if self.hooks else None,
                 "TELLS_TOP_HOOKS": True}
        with contextlib.ExitStack() as stack:
            for name, stand_in in names.items():
                stack.enter_context(mock.patch.object(terrace.torch.saved_tensors, name, stand_in, create=True))
            yield


class Hooks(unittest.TestCase):
    """A program's own hooks are on the stack: only what is ours comes and goes."""

    def setUp(self):
        self.hooks = []
        stack = contextlib.ExitStack()
        self.addCleanup(stack.close)
        stack.enter_context(Stack(self.hooks).played())
        self.theirs = (lambda tensor: tensor, lambda tensor: tensor)

    def test_ours_do_not_come_back_inside_a_programs(self):
        with models.plugin(saved_budget=0) as plugin:
            ours = self.hooks[-1]
            plugin.saved.remove()
            self.hooks.append(self.theirs)
            plugin._rest_or_wake()
            self.assertEqual(self.hooks, [self.theirs])
            self.hooks.pop()
            ledger(plugin)
            plugin._rest_or_wake()
            self.assertEqual(self.hooks, [ours])

    def test_the_end_leaves_a_programs_where_they_are(self):
        with models.plugin(saved_budget=0):
            self.hooks.append(self.theirs)
        self.assertEqual(self.hooks[-1], self.theirs)

    def test_transforms_put_ours_aside_and_no_others(self):
        seen = []

        class Disable:
            def __init__(disable, message):
                pass

            def __enter__(disable):
                seen.append(list(self.hooks))

            def __exit__(disable, *error):
                pass

        with mock.patch.object(torch.autograd.graph, "disable_saved_tensors_hooks", Disable, create=True):
            with models.plugin(saved_budget=0):
                ours = self.hooks[-1]
                aside = torch.autograd.graph.disable_saved_tensors_hooks

                def use():
                    with aside("no hooks"):
                        pass

                use()
                other = threading.Thread(target=use)  # as autograd's own threads: they have the stack, and did not install
                with mock.patch.object(threading.Thread, "_bootstrap_inner", _plain_bootstrap):
                    other.start()
                    other.join()
                self.assertEqual((seen, self.hooks), ([[], []], [ours]))
                self.hooks.append(self.theirs)
                use()
                self.assertEqual((seen[-1], self.hooks), ([ours, self.theirs],) * 2)
                self.hooks.pop()


if __name__ == "__main__":
    torch.set_num_threads(1)
    unittest.main()
