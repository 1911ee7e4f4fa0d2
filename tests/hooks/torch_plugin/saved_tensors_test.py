"""The contract of a saved tensor, kept while its bytes are in DDR: aliases, versions, lifetimes, errors."""

import gc
import threading
import unittest

import torch
from torch.utils.checkpoint import checkpoint

import models
from terrace.torch.budget import FixedBudget
from terrace.torch.torch_versions import revive, storage_of

SIZE = 64 << 10  # bytes


def tensor(seed=0, **options):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(SIZE // 4 // 64, 64, generator=generator, **options)


class Square(torch.autograd.Function):
    """Saves what it is given, and shows what it gets back."""

    got = []

    @staticmethod
    def forward(ctx, *tensors):
        ctx.save_for_backward(*tensors)
        return sum((t * t).sum() for t in tensors)

    @staticmethod
    def backward(ctx, grad):
        Square.got = list(ctx.saved_tensors)
        return tuple(2 * grad * t for t in ctx.saved_tensors)


class SavedTensors(unittest.TestCase):
    def setUp(self):
        Square.got = []

    def test_what_left_is_no_longer_in_memory_and_comes_back(self):
        with models.plugin(saved_budget=0) as plugin:
            x = tensor(requires_grad=True)
            y = x * 3
            weak = storage_of(y)._weak_ref()
            loss = Square.apply(y)
            expected = y.detach().clone()
            del y
            self.assertIsNone(revive(weak), "the graph alone holds it, and it has left")
            loss.backward()
            self.assertTrue(torch.equal(Square.got[0], expected))
            self.assertTrue(torch.equal(x.grad, 3 * 2 * expected))
            figures = plugin.figures()
            self.assertEqual((figures["spills"], figures["restores"]), (1, 1))
            self.assertEqual(figures["spilled_bytes"], SIZE)
            Square.got = []

    def test_a_storage_saved_many_times_travels_once_and_its_views_are_aliases_again(self):
        with models.plugin(saved_budget=0) as plugin:
            y = tensor(requires_grad=True) * 3
            views = [y, y.t(), y[1:, ::2], y.flatten()[5:]]
            expected = [v.detach().clone() for v in views]
            shapes = [(v.size(), v.stride(), v.storage_offset()) for v in views]
            loss = Square.apply(*views)
            del y, views
            loss.backward()
            self.assertEqual(plugin.figures()["spills"], 1)
            self.assertEqual([(v.size(), v.stride(), v.storage_offset()) for v in Square.got], shapes)
            self.assertTrue(all(torch.equal(a, b) for a, b in zip(Square.got, expected)))
            self.assertEqual(len({storage_of(v)._cdata for v in Square.got}), 1)
            Square.got = []

    def test_parts_with_version_counters_of_their_own(self):
        """As LSTM cells on the CPU do: parts of one storage, each changed in place before it is saved."""

        def run():
            x = tensor(requires_grad=True)
            y = x * 2
            for _ in range(2):
                parts = torch.unsafe_chunk(y * 1.5, 4, 0)
                parts = [part.sigmoid_() if index % 2 else part.tanh_() for index, part in enumerate(parts)]
                y = torch.cat([parts[0] * parts[1], parts[2] * parts[3], parts[1], parts[2]])
            y.sum().backward()
            return [x.grad]

        plain = run()
        with models.plugin(saved_budget=0) as plugin:
            self.assertTrue(models.same(run(), plain))
            gc.collect()
            self.assertGreater(plugin.figures()["restored_bytes"], 0)
            self.assertEqual((plugin.figures()["entries"], plugin.figures()["held"]), (0, 0))

    def test_types_come_back_as_they_were(self):
        dtypes = (torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float64, torch.complex64)
        with models.plugin(saved_budget=0) as plugin:
            class Save(torch.autograd.Function):
                @staticmethod
                def forward(ctx, x, *others):
                    ctx.save_for_backward(*others)
                    return x.sum()

                @staticmethod
                def backward(ctx, grad):
                    Square.got = list(ctx.saved_tensors)
                    return (grad.expand(3),) + (None,) * len(dtypes)

            others = [(tensor(i) * 3).to(dtype) for i, dtype in enumerate(dtypes)]
            expected = [t.clone() for t in others]
            loss = Save.apply(torch.ones(3, requires_grad=True), *others)
            del others
            loss.backward()
            self.assertEqual(plugin.figures()["restores"], len(dtypes))
            for got, want in zip(Square.got, expected):
                self.assertEqual(got.dtype, want.dtype)
                self.assertTrue(torch.equal(got, want))
            Square.got = []

    def test_a_change_in_place_raises_what_pytorch_raises(self):
        def changed(where):
            x = tensor(requires_grad=True)
            y = x * 3
            z = y.exp() if where == "output" else y * y
            with torch.no_grad():
                (z if where == "output" else y).add_(1)
            with self.assertRaises(RuntimeError) as caught:
                z.sum().backward()
            said = str(caught.exception)
            what, _, rest = said[said.index("one of the variables"):].partition("]")
            return what, rest[rest.index("is at version"):].split("Hint")[0]

        for where in ("input", "output"):
            plain = changed(where)
            for budget in (0, 1 << 40):
                with models.plugin(saved_budget=budget):
                    self.assertEqual(changed(where), plain, f"{where} saved under a budget of {budget}")

    def test_a_small_tensor_and_a_parameter_changed_in_place_raise_too(self):
        with models.plugin(saved_budget=0):
            for size in (3, 64):
                layer = torch.nn.Linear(size, size)
                out = layer(layer(torch.ones(size, size)))
                with torch.no_grad():
                    layer.weight.add_(1)
                with self.assertRaisesRegex(RuntimeError, "modified by an inplace operation"):
                    out.sum().backward()

    def test_parameters_never_leave(self):
        with models.plugin(saved_budget=0) as plugin:
            layer = torch.nn.Linear(256, 256, bias=False)
            self.assertGreaterEqual(layer.weight.numel() * 4, models.SMALLEST)
            x = torch.ones(1, 256, requires_grad=True)
            layer(layer(x)).sum().backward()
            self.assertEqual(plugin.figures()["spills"], 0)
            layer.double()  # other storages
            self.assertEqual(plugin.figures()["spills"], 0)
            for _ in range(5):
                (tensor(requires_grad=True) * 2).sin().sum().backward()
            spills = plugin.figures()["spills"]
            layer.float()  # others again, after the rounds in which they mostly change
            layer(layer(x)).sum().backward()
            self.assertEqual(plugin.figures()["spills"], spills)

    def test_what_others_hold_is_not_copied_back_and_then_left_alone(self):
        with models.plugin(saved_budget=0) as plugin:
            batch = tensor()  # of the program, for all steps
            scale = torch.ones(64, requires_grad=True)
            for _ in range(3):
                (batch * scale).sum().backward()
            figures = plugin.figures()
            self.assertEqual((figures["spills"], figures["restores"]), (1, 0))
            self.assertEqual(figures["revived_bytes"], SIZE)

    def test_a_graph_that_dies_without_backward_gives_everything_back(self):
        for budget in (0, SIZE, 1 << 40):
            with models.plugin(saved_budget=budget) as plugin:
                y = tensor(requires_grad=True) * 3
                loss = Square.apply(y, y * 2, y * 3)
                del y
                del loss
                gc.collect()
                figures = plugin.figures()
                self.assertEqual((figures["held"], figures["entries"]), (0, 0), budget)

    def test_backward_twice_over_a_kept_graph(self):
        for budget in (0, SIZE, 1 << 40):
            with models.plugin(saved_budget=budget) as plugin:
                x = tensor(requires_grad=True)
                y = x
                for _ in range(6):
                    y = (y * 1.1).sin()
                loss = y.sum()
                del y
                first, = torch.autograd.grad(loss, x, retain_graph=True)
                second, = torch.autograd.grad(loss, x, retain_graph=True)
                third, = torch.autograd.grad(loss, x)
                self.assertTrue(torch.equal(first, second) and torch.equal(first, third))
                with self.assertRaisesRegex(RuntimeError, "second time"):
                    torch.autograd.grad(loss, x)
                self.assertEqual(plugin.figures()["entries"], 0)

    def test_gradients_of_gradients(self):
        def second_order():
            x = tensor(dtype=torch.float64, requires_grad=True)
            y = ((x * 1.5).sin() * (x * 0.5).exp()).pow(3)
            first, = torch.autograd.grad(y.sum(), x, create_graph=True)
            del y
            second, = torch.autograd.grad(first.pow(2).sum(), x)
            return [first.detach(), second]

        plain = second_order()
        for budget in (0, 4 * SIZE):
            with models.plugin(saved_budget=budget) as plugin:
                self.assertTrue(models.same(second_order(), plain))
                self.assertGreater(plugin.figures()["spilled_bytes"], 0)

    def test_hooks_of_the_program_come_first_and_ours_go_on_afterwards(self):
        with models.plugin(saved_budget=0) as plugin:
            x = tensor(requires_grad=True)
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
                inner = Square.apply(x * 2)
            self.assertEqual(plugin.figures()["spills"], 0)
            (inner + Square.apply(x * 3)).backward()
            self.assertEqual(plugin.figures()["spills"], 1)
            self.assertTrue(torch.allclose(x.grad, 26 * x.detach()))

    def test_checkpoints_of_both_kinds(self):
        def run(reentrant):
            x = tensor(requires_grad=True)
            y = x * 2
            for _ in range(4):
                y = checkpoint(lambda t: (t * 1.1).sin().exp(), y, use_reentrant=reentrant)
            y.sum().backward()
            return [x.grad]

        for reentrant in (True, False):
            plain = run(reentrant)
            with models.plugin(saved_budget=0) as plugin:
                self.assertTrue(models.same(run(reentrant), plain))
                if reentrant or models.CHECKPOINTS_SAVE_INPUTS:
                    self.assertGreaterEqual(plugin.figures()["restored_bytes"], 3 * SIZE, reentrant)
                self.assertEqual(plugin.figures()["entries"], 0)

    def test_an_exception_in_the_middle_leaves_nothing_behind(self):
        class Fail(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.clone()

            @staticmethod
            def backward(ctx, grad):
                raise KeyError("in the middle of backward")

        with models.plugin(saved_budget=SIZE) as plugin:
            for where in ("forward", "backward", "forward", "backward"):
                y = tensor(requires_grad=True) * 2
                for _ in range(4):
                    y = (y * 1.1).sin()
                if where == "backward":
                    y = (Fail.apply(y) * 2).sin()
                    with self.assertRaises(KeyError):
                        y.sum().backward()
                del y
                gc.collect()
                self.assertEqual((plugin.figures()["entries"], plugin.figures()["held"]), (0, 0))
            x = tensor(requires_grad=True)
            (x * 2).sin().sum().backward()
            self.assertTrue(torch.equal(x.grad, 2 * (x.detach() * 2).cos()))

    def test_threads_that_share_nothing_and_a_graph_finished_elsewhere(self):
        plain = tensor(5, requires_grad=True)
        (plain * 2).sin().exp().sum().backward()
        with models.plugin(saved_budget=SIZE) as plugin:
            failures = []

            def work():
                try:
                    for _ in range(5):
                        x = tensor(5, requires_grad=True)
                        (x * 2).sin().exp().sum().backward()
                        if not torch.equal(x.grad, plain.grad):
                            raise AssertionError("another gradient")
                except BaseException as error:
                    failures.append(error)

            before = plugin.figures()["spills"]
            threads = [threading.Thread(target=work) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            self.assertEqual(failures, [])
            self.assertGreater(plugin.figures()["spills"], before, "new threads have the hooks")
            x = tensor(5, requires_grad=True)
            loss = (x * 2).sin().exp().sum()
            other = threading.Thread(target=loss.backward)
            other.start()
            other.join()
            self.assertTrue(torch.equal(x.grad, plain.grad))

    def test_what_is_not_dense_passes_through_and_is_counted(self):
        with models.plugin(saved_budget=0) as plugin:
            class Other(torch.Tensor):
                pass

            x = tensor(requires_grad=True)
            Square.apply((x * 2).as_subclass(Other)).backward()
            index = torch.arange(2000).reshape(2, -1)
            sparse = torch.sparse_coo_tensor(index, torch.ones(1000), (4000, 4000)).requires_grad_()
            torch.sparse.mm(sparse, torch.ones(4000, 8, requires_grad=True)).sum().backward()
            passed = plugin.figures()["passed"]
            self.assertGreater(passed.get("subclass", 0), 0)
            self.assertGreater(passed.get("not_dense", 0), 0)
            Square.got = []

    def test_ddr_that_is_full_leaves_the_rest_in_hbm(self):
        with models.plugin(saved_budget=0, ddr_budget=1 << 20) as plugin:
            x = torch.ones(1 << 17, requires_grad=True)
            y = x * 1
            for _ in range(6):
                y = (y * 1.1).sin()
            y.sum().backward()
            self.assertEqual(plugin.figures()["entries"], 0)
            self.assertGreater(plugin.figures()["failures"].get("ddr_full", 0), 0)
            plain = torch.ones(1 << 17, requires_grad=True)
            z = plain * 1
            for _ in range(6):
                z = (z * 1.1).sin()
        z.sum().backward()
        self.assertTrue(torch.equal(x.grad, plain.grad))

    def test_a_graph_made_before_the_end_is_finished_behind_it(self):
        x = tensor(requires_grad=True)
        with models.plugin(saved_budget=0):
            y = (x * 2).sin().exp()
        y.sum().backward()
        plain = tensor(requires_grad=True)
        (plain * 2).sin().exp().sum().backward()
        self.assertTrue(torch.equal(x.grad, plain.grad))

    @unittest.skipUnless(hasattr(torch, "func"), "this PyTorch has no torch.func")
    def test_transforms_work(self):
        with models.plugin(saved_budget=0) as plugin:
            got = torch.func.grad(lambda t: (t * 2).sin().sum())(tensor())
            self.assertTrue(torch.equal(got, 2 * (tensor() * 2).cos()))
            Square.apply(tensor(requires_grad=True) * 2).backward()
            self.assertEqual(plugin.figures()["spills"], 1, "the hooks are there again")

    def test_a_budget_that_shrinks_in_backward_is_kept(self):
        class Shrinking(FixedBudget):
            def limit(self, at):
                return 3 * SIZE if at.in_backward else 1 << 40

        def run():
            x = tensor(requires_grad=True)
            y = x * 1
            for _ in range(12):
                y = (y * 1.1).sin()
            y.sum().backward()
            return [x.grad]

        plain = run()
        with models.plugin(saved_budget=0) as plugin:
            plugin.ledger_of(torch.device("cpu")).budget = Shrinking(0, None)
            for _ in range(3):
                self.assertTrue(models.same(run(), plain))
            self.assertGreaterEqual(plugin.figures()["spilled_bytes"], 3 * 4 * SIZE)

    @unittest.skipUnless(hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks"),
                         "this PyTorch does not say whose hooks are installed")
    def test_hooks_rest_where_there_is_room_and_wake_where_there_is_not(self):
        class Roomy(FixedBudget):
            has_room = True

            def is_roomy(self):
                return self.has_room

            def limit(self, at):
                return 1 << 40 if self.has_room else 0

        with models.plugin(saved_budget=0) as plugin:
            budget = Roomy(0, None)
            plugin.ledger_of(torch.device("cpu")).budget = budget
            weight = torch.nn.Parameter(torch.ones(64))
            optimizer = torch.optim.SGD([weight], lr=1e-3)

            def step():
                (tensor() * weight).sin().sum().backward()
                optimizer.step()

            for _ in range(3):
                step()
            self.assertFalse(plugin.saved.installed)
            rounds = plugin.figures()["rounds"]
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
                step()  # the program's own come and go as ever
            step()
            self.assertEqual(plugin.figures()["rounds"], rounds)
            budget.has_room = False
            step()
            step()
            self.assertTrue(plugin.saved.installed)
            self.assertGreater(plugin.figures()["spills"], 0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    unittest.main()
