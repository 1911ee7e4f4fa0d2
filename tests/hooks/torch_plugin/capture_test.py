"""Who needs memory to stay where it is says so by calls of PyTorch's, which are played here: the plugin stands in front of them."""

import contextlib
import unittest
from unittest import mock

import torch

import models
import terrace.torch.plugin
from stack import BATCH, WEIGHTS, adamw, away, budget, layers, ledger
from terrace.torch.allocator import GrowingSegments, Reading
from terrace.torch.library import Stash
from terrace.torch.streams import CudaStreams
from terrace.torch.torch_versions import storage_of
from terrace.torch.travellers import ALL


def states_away(optimizer):
    return sum(values["exp_avg"].numel() == 0 for values in optimizer.state.values())


class Calls(unittest.TestCase):
    def setUp(self):
        self.stack = contextlib.ExitStack()
        self.addCleanup(self.stack.close)

    def replace(self, owner, name, value):
        self.stack.enter_context(mock.patch.object(owner, name, value, create=True))

    def test_a_capture_finds_all_of_it_whole_and_for_good(self):
        found = []

        class Graph:
            def capture_begin(self, pool=None):
                found.append((pool, away(self.model), states_away(self.optimizer), self.plugin.weights.stay))

        original = Graph.capture_begin
        self.replace(torch.cuda, "CUDAGraph", Graph)
        with budget(WEIGHTS) as plugin:
            model = layers()
            optimizer = adamw(model)
            for _ in range(2):
                model(BATCH).sum().backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            ledger(plugin).states.release(ALL)
            self.assertGreater(away(model), 0)
            self.assertGreater(states_away(optimizer), 0)
            graph = Graph()
            graph.model, graph.optimizer, graph.plugin = model, optimizer, plugin
            graph.capture_begin(pool=7)
            self.assertEqual(found, [(7, 0, 0, "captured")])
        self.assertIs(Graph.capture_begin, original)

    def test_memory_that_is_shared_is_of_ordinary_segments(self):
        ended = []

        class Pool:
            def __init__(self, device=None):
                ended.append("pool")

        self.replace(torch.cuda, "MemPool", Pool)
        self.replace(torch.UntypedStorage, "_share_cuda_", lambda storage: ended.append("shared"))
        self.replace(GrowingSegments, "end", lambda segments: ended.append("ordinary"))
        with models.plugin(saved_budget=0):
            Pool(device=0)
            storage_of(torch.ones(1))._share_cuda_()
        self.assertEqual(ended, ["ordinary", "pool", "ordinary", "shared"])


class Watch(unittest.TestCase):
    """The plugin of a GPU, over the emulated device."""

    @contextlib.contextmanager
    def opened(self):
        class Memory:
            def __init__(self, *unused):
                pass

            def read(self):
                return Reading(0, 0, 0, 0)

            def is_short(self):
                return False

        queued = []  # until CUDA begins
        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.object(torch.cuda, "_lazy_call", queued.append))
            for owner, name, value in ((terrace.torch.plugin, "Stash", lambda kind, *rest: Stash("emulated", *rest)),
                                       (terrace.torch.plugin, "TorchMemory", Memory),
                                       (CudaStreams, "finish", staticmethod(lambda device: None)),
                                       (CudaStreams, "current", staticmethod(lambda device: None))):
                stack.enter_context(mock.patch.object(owner, name, value))
            plugin = terrace.torch.plugin.Plugin("cuda", join_daemon=False, ddr_budget=1 << 20)
            plugin.start()
            try:
                plugin.ledger_of(torch.device("cuda", 0))
                self.assertIsNone(plugin._watch._thread)
                for call in queued:
                    call()
                yield plugin
            finally:
                plugin.stop()

    def test_it_begins_with_cuda_and_ends_before_a_capture(self):
        with self.opened() as plugin:
            thread = plugin._watch._thread
            self.assertTrue(thread.is_alive())
            plugin._before_capture()
            self.assertFalse(thread.is_alive())

    def test_it_ends_with_the_process(self):
        with self.opened() as plugin:
            thread = plugin._watch._thread
            with mock.patch.object(terrace.torch.plugin.report, "say"):
                plugin.end_process()
            self.assertFalse(thread.is_alive())

    def test_where_tensors_are_the_hosts_there_is_none(self):
        with mock.patch.object(torch.cuda, "_lazy_call", lambda call: call()), models.plugin(saved_budget=0) as plugin:
            ledger(plugin)
            self.assertIsNone(plugin._watch._thread)

    def test_what_lies_in_ddr_opens_a_ledger_where_nobody_asks_for_one(self):
        with self.opened() as plugin:
            plugin.ledger_of(torch.device("cuda", 0)).closed = True
            plugin._ledgers.clear()
            with mock.patch.object(torch.cuda, "device_count", lambda: 2), \
                 mock.patch.object(terrace.torch.plugin, "overflow_of", lambda index: index << 20):
                plugin._relieve()
            self.assertEqual(list(plugin._ledgers), [torch.device("cuda", 1)])


if __name__ == "__main__":
    torch.set_num_threads(1)
    unittest.main()
