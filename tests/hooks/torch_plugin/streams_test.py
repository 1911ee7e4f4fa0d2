"""Which stream waits for which: the emulated device under streams that are only numbers, and a record of what they are told."""

import contextlib
import unittest
from unittest import mock

import torch
from torch import nn

import models
from stack import BATCH, LAYER, LAYERS, adamw, away, budget, layers, ledger
from terrace.torch.library import Stash
from terrace.torch.streams import HostStreams
from terrace.torch.torch_versions import data_of
from terrace.torch.travellers import ALL

WIDTH = 64


class Streams:
    """`now` is the stream that is current; `said` what was asked of which stream, in order."""

    def __init__(self):
        self.now = 1
        self.said = []

    @contextlib.contextmanager
    def on(self, stream):
        before, self.now = self.now, stream
        try:
            yield
        finally:
            self.now = before

    def take(self):
        said, self.said = self.said, []
        return said

    def _note(self, what, stream, which=None):
        self.said.append((what, stream, which))

    @contextlib.contextmanager
    def recorded(self):
        def method(name):
            original = getattr(Stash, name)

            def call(stash, stream, *args):
                result = original(stash, None, *args)  # the emulated device's user is the host
                self._note(name, stream, result if name == "spill" else args[0])
                return result

            return mock.patch.object(Stash, name, call)

        functions = {
            "current": lambda device: self.now,
            "tie": lambda alias, device, stream: self._note("tie", stream),
            "mark": lambda device: self.now,  # a mark is known by its stream
            "wait_for": lambda device, mark: self._note("wait", self.now, mark),
            "follow": lambda device, first: self._note("follow", self.now, first),
            "finish": lambda device: self._note("finish", None),
        }
        with contextlib.ExitStack() as stack:
            for name in ("spill", "depart", "restore", "wait_for", "drop"):
                stack.enter_context(method(name))
            for name, function in functions.items():
                stack.enter_context(mock.patch.object(HostStreams, name, staticmethod(function), create=True))
            yield self


class Read(torch.autograd.Function):
    """Reads what it saved on a stream of its own in backward."""

    streams = None

    @staticmethod
    def forward(ctx, tensor, stream):
        ctx.stream = stream
        ctx.save_for_backward(tensor)
        return (tensor * tensor).sum()

    @staticmethod
    def backward(ctx, grad):
        with Read.streams.on(ctx.stream):
            tensor, = ctx.saved_tensors
            Read.streams.said.append(("read", ctx.stream, None))
        return 2 * grad * tensor, None


class Test(unittest.TestCase):
    def setUp(self):
        self.streams = Read.streams = Streams()
        stack = contextlib.ExitStack()
        self.addCleanup(stack.close)
        stack.enter_context(self.streams.recorded())

    def waits(self, said):
        return [stream for what, stream, _ in said if what == "wait_for"]

    def told(self, what):
        return [(stream, which) for said, stream, which in self.streams.take() if said == what]


class SavedTensors(Test):
    def test_each_stream_that_reads_one_waits_for_it_once(self):
        for first, second in ((1, 2), (2, 1)):
            with models.plugin(saved_budget=1 << 30) as plugin:
                x = torch.ones(WIDTH, WIDTH, requires_grad=True)
                shared = x * 1
                with self.streams.on(2):
                    losses = {2: Read.apply(shared, 2)}
                losses[1] = Read.apply(shared, 1)
                again = Read.apply(shared, 2)
                del shared
                with ledger(plugin).lock:
                    ledger(plugin)._leave_until(0)
                self.streams.take()
                losses[first].backward(retain_graph=True)
                losses[second].backward(retain_graph=True)
                again.backward()
                said = self.streams.take()
                waited = set()
                for what, stream, _ in said:
                    if what == "wait_for":
                        self.assertNotIn(stream, waited)
                        waited.add(stream)
                    elif what == "read":
                        self.assertIn(stream, waited, said)

    def test_memory_is_tied_to_the_stream_that_saved_it(self):
        with models.plugin(saved_budget=0):
            x = torch.ones(WIDTH, WIDTH, requires_grad=True)
            y = x * 3  # allocated on 1
            self.streams.take()
            with self.streams.on(2):
                y.sin()
            said = [(what, stream) for what, stream, _ in self.streams.take()]
            self.assertLess(said.index(("tie", 2)), said.index(("depart", 2)))


class On(torch.autograd.Function):
    """Whose backward goes on on another stream, as PyTorch's own does."""

    @staticmethod
    def forward(ctx, tensor, stream):
        ctx.stream = stream
        return tensor * 1

    @staticmethod
    def backward(ctx, grad):
        Read.streams.now = ctx.stream
        return grad * 1, None


class Gradients(Test):
    def test_each_leaves_behind_the_stream_that_made_it(self):
        with models.plugin(saved_budget=1 << 30, optimizer="ddr", gradients="ddr"):
            model = nn.Module()
            model.first, model.second = (nn.Parameter(torch.ones(WIDTH, WIDTH)) for _ in range(2))
            for _ in range(2):
                self.streams.now = 1
                self.streams.take()
                second, first = On.apply(model.second, 2), On.apply(model.first, 3)
                (second.pow(2).sum() + first.pow(2).sum()).backward()
                said = self.streams.take()
            spilled = [stream for what, stream, _ in said if what == "spill"]
            self.assertEqual(spilled, [2, 3], said)
            self.assertTrue({("tie", 2, None), ("tie", 3, None)} <= set(said))

    def test_whoever_reads_one_that_came_back_elsewhere_waits(self):
        with models.plugin(saved_budget=1 << 40, optimizer="ddr", gradients="ddr") as plugin:
            model = layers()
            model(BATCH).pow(2).mean().backward()
            ledger(plugin).states.release(ALL)
            for parameter in model.parameters():
                parameter.grad
            self.streams.take()
            with self.streams.on(2):
                for parameter in model.parameters():
                    parameter.grad
                    parameter.grad
            said = self.streams.take()
            self.assertEqual([item for item in said if item[0] == "wait"], [("wait", 2, 1)] * (LAYERS - 1))
            self.assertEqual(said.count(("tie", 2, None)), LAYERS - 1)

    def test_nobody_waits_under_a_capture_for_what_came_before(self):
        with models.plugin(saved_budget=1 << 40, optimizer="ddr", gradients="ddr") as plugin:
            model = layers()
            model(BATCH).pow(2).mean().backward()
            ledger(plugin).states.release(ALL)
            plugin._before_capture()
            self.streams.take()
            with self.streams.on(2):
                for parameter in model.parameters():
                    parameter.grad
            self.assertEqual(self.told("wait"), [])


class States(Test):
    def test_an_update_waits_for_what_came_back_elsewhere(self):
        with models.plugin(saved_budget=1 << 40, optimizer="ddr") as plugin:
            model = layers()
            optimizer = adamw(model)
            for _ in range(2):
                model(BATCH).pow(2).mean().backward()
                optimizer.step()
            ledger(plugin).states.release(ALL)
            with self.streams.on(2):
                optimizer.state_dict()
            self.streams.take()
            optimizer.step()
            self.assertEqual(self.told("wait")[: 2 * LAYERS], [(1, 2)] * (2 * LAYERS))


class Weights(Test):
    def test_whoever_uses_one_that_came_back_elsewhere_waits(self):
        with budget(6 * LAYER) as plugin:
            model = layers(range(LAYERS))
            gone = next(m for m in model if data_of(m._parameters["weight"]).stride() == (0, 0))
            gone.weight
            self.streams.take()
            with self.streams.on(2):
                gone.weight
                gone.weight
            said = self.streams.take()
            self.assertEqual([item for item in said if item[0] == "wait"], [("wait", 2, 1)], said)
            self.assertIn(("tie", 2, None), said)
            self.assertEqual(plugin.figures()["failures"], {})

    def test_when_none_moves_any_more_all_are_there_for_every_stream(self):
        with budget(6 * LAYER) as plugin:
            model = layers(range(LAYERS))
            self.assertGreater(away(model), 0)
            self.streams.take()
            plugin.weights.end("compiled")
            self.assertEqual([what for what, *_ in self.streams.take()][-1], "finish")

    def test_one_leaves_behind_all_streams_that_used_it(self):
        with budget(6 * LAYER):
            model = layers(range(LAYERS))
            with self.streams.on(2):
                model(BATCH)
            self.streams.take()
            model(BATCH)
            said = self.streams.take()
            left = next(index for index, item in enumerate(said) if item[0] in ("spill", "depart") and item[1] == 1)
            self.assertIn(("follow", 1, 2), said[:left])

    def test_one_leaves_behind_the_stream_of_the_update(self):
        with budget(6 * LAYER):
            model = layers(range(4))
            optimizer = adamw(model)
            for _ in range(2):
                model(BATCH).pow(2).mean().backward()
                with self.streams.on(3):
                    optimizer.step()
                self.streams.take()
            with torch.no_grad():
                model(BATCH)
                model(BATCH)
            said = self.streams.take()
            left = next(index for index, item in enumerate(said) if item[0] in ("spill", "depart"))
            self.assertIn(("follow", 1, 3), said[:left])


if __name__ == "__main__":
    torch.set_num_threads(1)
    unittest.main()
