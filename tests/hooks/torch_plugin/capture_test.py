"""Who needs memory to stay where it is says so by calls of PyTorch's, which are played here: the plugin stands in front of them."""

import contextlib
import sys
import unittest
from unittest import mock

import torch

import models
import terrace.torch.plugin
from stack import BATCH, WEIGHTS, adamw, away, budget, layers, ledger
from terrace.torch.allocator import GrowingSegments, PrivatePools, Reading
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


class Pools(unittest.TestCase):
    """What lies in memory of graphs stays. The allocator's answers are played: it has ordinary segments and those of a pool."""

    GRAPHS = (0, 3)

    def setUp(self):
        self.pools = PrivatePools()
        self.reserved = [10, 0]
        self.segments = [{"address": 1000, "total_size": 100, "segment_pool_id": (0, 0), "device": 0},
                         {"address": 2000, "total_size": 100, "segment_pool_id": self.GRAPHS, "device": 0},
                         {"address": 4000, "total_size": 100, "segment_pool_id": self.GRAPHS, "device": 1}]
        self.snapshots = 0
        for name, value in (("memory_snapshot", self.snapshot), ("memory_stats_as_nested_dict", self.stats)):
            patch = mock.patch.object(torch.cuda, name, value)
            patch.start()
            self.addCleanup(patch.stop)

    def snapshot(self):
        self.snapshots += 1
        return self.segments

    def stats(self, device):
        return {"reserved_bytes": {"all": {"allocated": self.reserved[0], "freed": self.reserved[1]}}}

    def inside(self, *addresses):
        return [self.pools.has(torch.device("cuda", 0), address) for address in addresses]

    def test_only_a_pools_segments_of_the_device_count(self):
        self.pools.note()
        self.assertEqual(self.inside(999, 1050, 1999, 2000, 2099, 2100, 4050), [False] * 3 + [True] * 2 + [False] * 2)
        self.assertEqual(self.snapshots, 1)

    def test_they_are_looked_at_again_when_something_was_reserved_or_given_back(self):
        self.pools.note()
        self.assertEqual(self.inside(3000), [False])
        self.segments.append({"address": 3000, "total_size": 10, "segment_pool_id": self.GRAPHS, "device": 0})
        self.reserved[0] += 1
        self.assertEqual(self.inside(3000, 3009, 2000), [True] * 3)
        del self.segments[1]
        self.reserved[1] += 1
        self.assertEqual(self.inside(3000, 2000), [True, False])

    def test_nobody_is_asked_where_there_are_no_pools(self):
        with mock.patch.dict(sys.modules):
            sys.modules.pop("torch._inductor.cudagraph_trees", None)
            self.assertEqual(self.inside(2050), [False])
            self.assertEqual(self.snapshots, 0)
            sys.modules["torch._inductor.cudagraph_trees"] = object()
            self.assertEqual(self.inside(2050), [True])

    def test_an_allocator_that_does_not_tell_has_none(self):
        self.pools.note()
        with mock.patch.object(torch.cuda, "memory_snapshot", side_effect=RuntimeError("cudaMallocAsync does not yet support it")):
            self.assertEqual(self.inside(2050), [False])

    def test_saved_tensors_and_gradients_in_a_pool_stay(self):
        for pooled in (False, True):
            with self.subTest(pooled=pooled), budget(WEIGHTS // 2) as plugin:
                plugin.saved.lies_in_a_pool = plugin.gradients.lies_in_a_pool = lambda device, address: pooled
                model = layers()
                optimizer = adamw(model)
                for _ in range(2):
                    model(torch.cat([BATCH] * 200).requires_grad_()).sum().backward()
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=True)
                figures = plugin.figures()
                self.assertEqual(figures["gradient_bytes"] == 0, pooled)
                self.assertEqual(plugin.saved.passed["pool"] > 0, pooled)


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
