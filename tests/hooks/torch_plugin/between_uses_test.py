"""Gradients and weights in DDR between their uses: the same bits, whole whenever somebody looks, within the budget."""

import contextlib
import copy
import gc
import io
import unittest
from unittest import mock

import torch
from torch import nn

import models
from stack import BATCH, LAYER, LAYERS, WEIGHTS, WIDTH, adamw, away, budget, layers, ledger, train, whole_weights
from terrace.torch.parameters import Parameters
from terrace.torch.streams import HostStreams
from terrace.torch.torch_versions import data_of, expired, gradient_of, storage_of
from terrace.torch.travellers import ALL


def lambda_free(x: torch.Tensor) -> torch.Tensor:
    return x * 2


class NothingSaid(unittest.TestCase):
    """Weights, gradients and state are 2 MiB; what is saved is the batch and what seven layers give."""

    def run_with(self, rows, nbytes):
        batch = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(4))

        def losses():
            model = layers()
            optimizer = adamw(model)
            seen = []
            for _ in range(4):
                loss = model(batch).pow(2).mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                seen.append(loss.detach().clone())
            return seen

        plain = losses()
        with budget(nbytes, tier=None) as plugin:
            self.assertTrue(models.same(losses(), plain))
            return plugin.figures()

    def test_state_stays_while_saved_tensors_suffice(self):
        figures = self.run_with(rows=4096, nbytes=14 << 20)  # 16 MiB are saved
        self.assertGreater(figures["spilled_bytes"], 0)
        self.assertEqual(figures["state_bytes"], 0)

    def test_state_leaves_where_they_do_not(self):
        figures = self.run_with(rows=64, nbytes=5 * WEIGHTS // 2)
        self.assertGreater(figures["state_bytes"], 0)


class Gradients(unittest.TestCase):
    def test_trainings_have_the_same_bits(self):
        for options in ({}, {"micro_batches": 3}, {"model_options": {"kind": "moe"}}, {"autocast": True}):
            plain = models.train(steps=2, **options)
            with models.plugin(saved_budget=200_000, optimizer="ddr", gradients="ddr") as plugin:
                self.assertTrue(models.same(models.train(steps=2, **options), plain), options)
                self.assertEqual(plugin.figures()["failures"], {})
                gc.collect()
                ledger(plugin).settle()
                self.assertEqual(plugin.figures()["entries"], 0)

    def test_every_form_of_update(self):
        forms = {
            "adamw, foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
            "adamw, single": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
            "sgd, nesterov, foreach": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True, foreach=True),
            "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, weight_decay=0.1, maximize=True),
        }
        with contextlib.suppress(TypeError, RuntimeError):  # for the CPU in some releases only
            torch.optim.AdamW(layers().parameters(), fused=True)
            forms["adamw, fused"] = lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True)
        for name, form in forms.items():
            for room in (0, 1 << 40):
                def looking(model, optimizer, step):
                    if step == 1:
                        norms.append(torch.stack([p.grad.norm() for p in model.parameters()]))

                norms = []
                model = layers()
                plain = train(model, form(model.parameters()), between=looking) + norms
                norms = []
                with models.plugin(saved_budget=0, optimizer="ddr", gradients="ddr", update_room=room) as plugin:
                    model = layers()
                    self.assertTrue(models.same(train(model, form(model.parameters()), between=looking) + norms, plain),
                                    f"{name}, {room}")
                    self.assertEqual(plugin.figures()["failures"], {})

    def test_those_that_left_are_no_longer_in_memory_and_whoever_looks_sees_them(self):
        model = layers()
        model(BATCH).pow(2).mean().backward()
        plain = [p.grad.clone() for p in model.parameters()]
        with models.plugin(saved_budget=1 << 40, optimizer="ddr", gradients="ddr") as plugin:
            model = layers()
            model(BATCH).pow(2).mean().backward()
            ledger(plugin).states.release(ALL)
            here = [p for p in model.parameters() if gradient_of(p).numel()]
            self.assertEqual(len(here), 1, "the last one, of which nobody knows that it is the last")
            self.assertTrue(models.same([p.grad for p in model.parameters()], plain))
            self.assertEqual([gradient_of(p).numel() for p in model.parameters()], [WIDTH * WIDTH] * LAYERS)

    def test_states_leave_as_far_as_a_round_has_no_room_for_them(self):
        plain = None
        for kib, least, most in ((8192, 0, 0), (2300, 1, 15 * LAYER), (1280, 14 * LAYER, 18 * LAYER)):
            moved = []
            with budget(kib * 1024, smallest=4096) as plugin:
                model = layers()
                optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
                got = train(model, optimizer, 9, lambda *unused: moved.append(plugin.figures()["state_bytes"]))
                self.assertLessEqual(plugin.figures()["hbm_peak_bytes"], kib * 1024)
            plain = plain or got
            self.assertTrue(models.same(got, plain), kib)
            self.assertGreaterEqual((moved[-1] - moved[-2]) / 2, least, f"{kib} KiB: {moved}")
            self.assertLessEqual((moved[-1] - moved[-2]) / 2, most, f"{kib} KiB: {moved}")

    def test_what_a_round_needs_beside_what_is_saved_is_learned(self):
        """Weights, gradients as they come, and no saved tensor, whether it stayed or left and came back."""
        for kib in (8192, 640):
            with budget(kib * 1024, smallest=4096) as plugin:
                model = layers()
                for _ in range(3):
                    model(BATCH).pow(2).mean().backward()
                    ledger(plugin).settle()
                    model.zero_grad(set_to_none=True)
                needs = ledger(plugin).schedule.known[0].needs
                self.assertEqual((ledger(plugin).standing().alive, ledger(plugin).held), (0, 0))
                self.assertEqual(plugin.figures()["restored_bytes"] > 0, kib == 640)
            if kib == 8192:
                self.assertEqual(needs.others(0), WEIGHTS)
                self.assertEqual(needs.most, 2 * WEIGHTS)
            else:
                self.assertLess(needs.most, 640 * 1024)

    def test_clipping_accumulating_and_zeroing(self):
        def clip(model, optimizer, step):
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.01))

        for micro_batches in (1, 3):
            norms = []
            model = layers()
            plain = train(model, adamw(model), between=clip, micro_batches=micro_batches) + norms
            norms = []
            with models.plugin(saved_budget=0, optimizer="ddr", gradients="ddr", update_room=0):
                model = layers()
                got = train(model, adamw(model), between=clip, micro_batches=micro_batches) + norms
                self.assertTrue(models.same(got, plain))
                for set_to_none in (False, True):
                    model(BATCH).sum().backward()
                    model.zero_grad(set_to_none=set_to_none)
                    self.assertTrue(all((p.grad is None) if set_to_none else (p.grad == 0).all()
                                        for p in model.parameters()))

    def test_letting_go_of_what_is_away_moves_nothing(self):
        with models.plugin(saved_budget=1 << 40, optimizer="ddr", gradients="ddr") as plugin:
            model = layers()
            optimizer = adamw(model)
            model(BATCH).sum().backward()
            ledger(plugin).states.release(ALL)
            before = plugin.figures()["restored_bytes"]
            optimizer.zero_grad(set_to_none=True)
            self.assertEqual(plugin.figures()["restored_bytes"], before)
            ledger(plugin).settle()
            self.assertEqual(plugin.figures()["entries"], 0)

    def test_one_that_somebody_holds_stays(self):
        with models.plugin(saved_budget=0, optimizer="ddr", gradients="ddr") as plugin:
            model = layers()
            model(BATCH).sum().backward()
            held = [p.grad for p in model.parameters()]
            expected = [2 * g.clone() for g in held]
            model(BATCH).sum().backward()
            ledger(plugin).states.release(ALL)
            self.assertTrue(models.same(held, expected))

    def test_a_backward_that_fails_leaves_gradients_that_are_whole(self):
        class Fail(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.clone()

            @staticmethod
            def backward(ctx, grad):
                raise KeyError("in the middle")

        def run():
            model = layers()
            x = model[:4](BATCH)
            with contextlib.suppress(KeyError):
                model[4:](Fail.apply(x)).sum().backward()
            return [p.grad for p in model.parameters() if p.grad is not None] + train(model, adamw(model))

        plain = run()
        with models.plugin(saved_budget=0, optimizer="ddr", gradients="ddr"):
            self.assertTrue(models.same(run(), plain))

    def test_the_end_puts_back_what_was_there(self):
        model = layers()
        with models.plugin(saved_budget=0, optimizer="ddr", gradients="ddr"):
            model(BATCH).sum().backward()
        self.assertNotIn("grad", vars(nn.Parameter))
        self.assertTrue(all(p.grad.numel() == WIDTH * WIDTH for p in model.parameters()))
        self.assertFalse(any(p._backward_hooks for p in model.parameters()))


class Captures(unittest.TestCase):
    """A capture is only played here: what a graph would refer to is whole before, and never moves afterwards."""

    def test_what_a_graph_refers_to_stays(self):
        def run(during):
            model = layers()
            optimizer = adamw(model)
            seen = train(model, optimizer, 2)
            with during(model, optimizer):
                model(BATCH).pow(2).mean().backward()
                optimizer.step()
            seen += [p.grad.clone() for p in model.parameters()]
            model(BATCH).pow(2).mean().backward()
            return seen + [p.grad for p in model.parameters()] + whole_weights(model)

        plain = run(lambda *_: contextlib.nullcontext())

        @contextlib.contextmanager
        def capture(model, optimizer):
            plugin._before_capture()
            with mock.patch.object(HostStreams, "is_capturing", lambda: True):
                before = dict(ledger(plugin).states.moved)
                yield
                self.assertEqual(dict(ledger(plugin).states.moved), before)
            addresses.extend(p.grad.data_ptr() for p in model.parameters())
            addresses.extend(v.data_ptr() for values in optimizer.state.values() for v in values.values()
                             if isinstance(v, torch.Tensor))
            held.extend((model, optimizer))

        for share in (100, 300):
            addresses, held = [], []
            with budget(WEIGHTS * share // 100, gradients="ddr") as plugin:
                self.assertTrue(models.same(run(capture), plain))
                model, optimizer = held
                model(BATCH).sum().backward()
                ledger(plugin).states.release(ALL)
                now = [gradient_of(p).data_ptr() for p in model.parameters()]
                now += [v.data_ptr() for values in optimizer.state.values() for v in values.values()
                        if isinstance(v, torch.Tensor)]
                self.assertEqual(now, addresses)
                self.assertEqual((away(model), plugin.weights.stay), (0, "captured"))


class Weights(unittest.TestCase):
    def check(self, run, share, moved=True):
        plain = run()
        with budget(WEIGHTS * share // 100) as plugin:
            got = run()
            figures = plugin.figures()
        self.assertTrue(models.same(got, plain))
        self.assertEqual(figures["failures"], {})
        if moved:
            self.assertGreater(figures["weight_bytes"], 0)
        return figures

    def test_trainings_have_the_same_bits_whatever_part_is_trained(self):
        for frozen in ((), range(LAYERS - 2), range(0, LAYERS, 2)):
            def run():
                model = layers(frozen)
                return train(model, adamw(model), steps=4)

            for share in (100, 200):
                self.check(run, share, moved=share == 100)

    def test_frozen_weights_are_copied_out_once(self):
        def run():
            model = layers(range(LAYERS - 1))
            return train(model, adamw(model), steps=5)

        plain = run()
        with budget(WEIGHTS) as plugin:
            self.assertTrue(models.same(run(), plain))
            figures = plugin.figures()
        self.assertGreater(figures["restored_bytes"], figures["spilled_bytes"])

    def test_they_are_within_the_budget(self):
        for frozen, share in ((range(LAYERS - 1), 80), ((), 150)):
            with budget(WEIGHTS * share // 100) as plugin:
                model = layers(frozen)
                optimizer = adamw(model)
                for _ in range(4):
                    model(BATCH).pow(2).mean().backward()
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=True)
                figures = plugin.figures()
            self.assertGreater(figures["weight_bytes"] + figures["gradient_bytes"], 0)
            self.assertLessEqual(figures["hbm_peak_bytes"], WEIGHTS * share // 100, frozen)

    def test_modes_evaluation_and_second_order(self):
        def run():
            model = layers(range(3))
            optimizer = adamw(model)
            seen = train(model, optimizer)
            with torch.no_grad():
                seen.append(model(BATCH))
            with torch.inference_mode():
                seen.append(model(BATCH).clone())
            model.eval()
            seen.append(model(BATCH).detach())
            x = BATCH.clone().requires_grad_()
            first, = torch.autograd.grad(model(x).pow(3).sum(), x, create_graph=True)
            second, = torch.autograd.grad(first.pow(2).sum(), x)
            loss = model(BATCH).sum()
            loss.backward(retain_graph=True)
            loss.backward()
            seen += [second] + [p.grad for p in model.parameters() if p.grad is not None]
            return [torch.empty(0).new_tensor(t.tolist()) for t in seen] + train(model, optimizer)

        self.check(run, 100)

    def test_who_looks_sees_them_whole(self):
        def run():
            model = layers(range(4))
            optimizer = adamw(model)
            seen = train(model, optimizer)
            saved = io.BytesIO()
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, saved)
            saved.seek(0)
            state = torch.load(saved)
            seen += list(state["model"].values())
            train(model, optimizer)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            seen += train(model, optimizer)
            twin = copy.deepcopy(model)
            seen += whole_weights(twin)
            whole = io.BytesIO()
            torch.save(model, whole)
            whole.seek(0)
            seen += whole_weights(torch.load(whole, weights_only=False))
            for p in model.parameters():
                p.data.mul_(0.5)
            model[1].weight.data = model[2].weight.data.clone()
            with torch.no_grad():
                model[3].weight.mul_(2)
            return seen + train(model, optimizer)

        self.check(run, 120)

    def test_nothing_of_ours_is_in_a_file(self):
        with budget(WEIGHTS):
            torch.manual_seed(0)
            model = nn.ModuleList([layers(), nn.LSTM(WIDTH, WIDTH)])
            train(model[0], adamw(model[0]), 1)
            optimizer = adamw(model[0])
            model[0](BATCH).sum().backward()
            optimizer.step()
            for what in (model, model.state_dict(), optimizer.state_dict(), list(model.parameters()),
                         [p.grad for p in model[0].parameters()]):
                file = io.BytesIO()
                torch.save(what, file)
                self.assertNotIn(b"terrace", file.getvalue())

    def test_a_model_looks_as_large_as_it_is(self):
        with budget(WEIGHTS) as plugin:
            model = layers()
            self.assertGreater(away(model), 0, "it was too large when it was built")
            self.assertEqual(sum(p.numel() for p in model.parameters()), LAYERS * WIDTH * WIDTH)
            self.assertTrue(all(p.shape == (WIDTH, WIDTH) for p in model.parameters()))
            gone = next(p for p in model.parameters() if data_of(p).stride() == (0, 0))
            self.assertTrue(torch.add(gone, 0).isnan().all(), "read past us it is nothing that one overlooks")
            model.double()
            self.assertTrue(all(p.detach().dtype is torch.float64 for p in model.parameters()))
            self.assertEqual(plugin.figures()["failures"], {})

    def test_one_in_use_never_leaves(self):
        class Tied(nn.Module):
            def __init__(self):
                super().__init__()
                torch.manual_seed(0)
                self.inner = layers()
                self.first = nn.Linear(WIDTH, WIDTH, bias=False)
                self.last = nn.Linear(WIDTH, WIDTH, bias=False)
                self.last.weight = self.first.weight

            def forward(self, x):
                early = self.inner[0].weight  # held while all the others come and go
                x = self.last(self.inner(self.first(x)))
                return x @ early

        def run():
            model = Tied()
            return train(model, adamw(model))

        self.check(run, 100)

    def test_one_in_use_stays_when_a_module_is_made_meanwhile(self):
        class Making(nn.Module):
            def __init__(self, spare):
                super().__init__()
                self.inner = layers()
                self.spare = spare

            def forward(self, x):
                early = self.inner[0].weight  # held while all the others come and go
                self.made = [nn.Linear(WIDTH, WIDTH) for _ in range(self.spare)]
                if self.spare > 1:
                    return x @ early + self.inner(x)
                return self.inner(x) + x @ early

        # Where they move already, and where it is that module for which there is no room.
        for spare, share, steps in ((1, 75, 3), (1, 110, 3), (8, 150, 1)):
            def run():
                model = Making(spare)
                optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
                with torch.no_grad():
                    seen = [model(BATCH)]
                return seen + train(model, optimizer, steps) + [model(BATCH).detach()]

            self.check(run, share)

    def test_memory_given_to_a_parameter_between_the_passes(self):
        def run():
            model = layers()
            optimizer = adamw(model)
            seen = train(model, optimizer, 2)
            loss = model(BATCH).pow(2).mean()
            model[3].weight.data = model[3].weight.data * 2
            loss.backward()
            return seen + [p.grad for p in model.parameters()] + whole_weights(model)

        self.check(run, 100)

    def test_memory_that_a_parameter_had_goes_with_the_graph_that_saved_it(self):
        with budget(WEIGHTS):
            model = layers()
            loss = model(BATCH).sum()
            weight = model[3].weight
            was = storage_of(data_of(weight))._weak_ref()
            weight.data = weight.data * 2
            self.assertFalse(expired(was), "backward is to read it")
            del loss, weight
            self.assertTrue(expired(was))
            self.assertTrue(torch.equal(model[3].weight.detach(), 2 * layers()[3].weight.detach()))

    def test_a_graph_of_before_the_end_reads_what_it_saved(self):
        def run(end):
            model = layers()
            loss = model(BATCH).pow(2).sum()
            end()
            model[3].weight.data = model[3].weight.data * 2
            loss.backward()
            return [p.grad for p in model.parameters()]

        plain = run(lambda: None)
        with budget(WEIGHTS) as plugin:
            self.assertTrue(models.same(run(plugin.weights.end), plain))

    def test_memory_that_was_a_weights_is_nobodys(self):
        with budget(WEIGHTS) as plugin:
            model = layers()
            model(BATCH)
            weight = model[-1].weight
            was = storage_of(data_of(weight))
            weight.data = torch.ones(WIDTH, WIDTH)
            # As an allocator may give it to a tensor that is saved next.
            again = torch.empty(0).set_(was).view(WIDTH, WIDTH)
            self.assertIsNone(plugin.weights.pack(again))
            self.assertIsNotNone(plugin.weights.pack(model[-1].weight.t()))

    def test_lists_of_their_own_keep_weights_here(self):
        def run():
            torch.manual_seed(0)
            model = nn.ModuleList([layers(), nn.LSTM(WIDTH, WIDTH)])
            forward = lambda x: model[1](model[0](x).unsqueeze(0))[0].squeeze(0)  # noqa: E731
            holder = nn.Module()
            holder.both = model
            holder.forward = forward
            return train(holder, adamw(holder))

        self.check(run, 190)

    def test_traced_modules_keep_theirs_and_scripted_functions_change_nothing(self):
        with budget(WEIGHTS) as plugin:
            model = layers()
            torch.jit.script(lambda_free)
            self.assertIsNone(plugin.weights.stay)
            plain = model(BATCH)
            traced = torch.jit.trace(model, BATCH)
            self.assertEqual((away(model), plugin.weights.stay), (0, "compiled"))
            self.assertTrue(torch.equal(traced(BATCH), plain))

    @unittest.skipUnless(hasattr(torch, "compile"), "this PyTorch does not compile")
    def test_compiled_modules_keep_theirs(self):
        with budget(WEIGHTS) as plugin:
            model = layers()
            torch.compile(model)
            self.assertEqual((away(model), plugin.weights.stay), (0, "compiled"))

    def test_the_end_puts_back_what_was_there(self):
        def patched():
            return [getattr(nn.Module, name) for name in ("__getattr__", "__setstate__", "_apply", "zero_grad", "register_parameter",
                                                          "_load_from_state_dict")] + [torch.optim.Optimizer.zero_grad]

        before = patched()
        with budget(WEIGHTS):
            model = layers()
            train(model, adamw(model), 1)
            model(BATCH)
            self.assertGreater(away(model), 0)
        self.assertEqual(away(model), 0)
        self.assertEqual(before, patched())
        self.assertFalse({"data", "grad", "detach", "copy_"} & set(vars(nn.Parameter)))

    def test_models_that_come_and_go_leave_nothing(self):
        with budget(WEIGHTS) as plugin:
            for _ in range(3):
                model = layers(range(LAYERS))
                model(BATCH)
                self.assertGreater(away(model), 0)
                del model
                gc.collect()
                ledger(plugin).settle()
                self.assertEqual(plugin.figures()["entries"], 0)
            self.assertLessEqual(len(Parameters.alive()), LAYERS)


if __name__ == "__main__":
    torch.set_num_threads(1)
    unittest.main()
