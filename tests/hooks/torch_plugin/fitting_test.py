"""Budgets that fit: a GPT over a model of PyTorch's allocator and of the wall, with ledger, schedule and budget as they are."""

import contextlib
import itertools
import random
import unittest
import weakref
from unittest import mock

import torch

from allocator_model import MIB, CachingAllocator, Gpt, WallLease
from terrace.torch import residency
from terrace.torch.budget import DeviceBudget
from terrace.torch.schedule import Schedule

CONTEXT = 600


class Storage:
    """Memory of the model instead of a device's, with what the ledger asks of PyTorch's."""

    _numbers = itertools.count(1)

    def __init__(self, job, size):
        self._job, self._size, self._block = job, size, job.allocate(size)
        self._cdata = next(Storage._numbers)

    def __del__(self):
        self._job.allocator.free(self._block)

    def nbytes(self):
        return self._size * MIB

    def data_ptr(self):
        return self._cdata

    def _weak_ref(self):
        return weakref.ref(self)


class Tensor:
    def __init__(self, storage, size):
        self.data, self.size, self.dtype = storage, size, torch.uint8


class Stash:
    """Copies take no time."""

    def __init__(self):
        self.moved = 0
        self._sizes = {}
        self._entries = itertools.count(1)

    def spill(self, stream, address, nbytes, purpose=0):
        entry = next(self._entries)
        self._sizes[entry] = nbytes
        self.moved += nbytes // MIB
        return entry

    def restore(self, stream, entry, address):
        self.moved += self._sizes[entry] // MIB

    def drop(self, stream, entry):
        del self._sizes[entry]

    def wait_for(self, stream, entry):
        pass

    depart = wait_for


class Job:
    """The program's side: tensors, saved and read as the hooks of saved tensors do it."""

    def __init__(self, limit, random_, resets):
        self.allocator = CachingAllocator(limit)
        self.lease = WallLease(self.allocator, CONTEXT)
        self.budget = DeviceBudget(self.allocator, self.lease)
        self.stash = Stash()
        self.ledger = residency.Ledger(self.stash, torch.device("cpu"), self.lease, self.budget, Schedule(), self)
        self._random, self._resets = random_, resets
        self.most = 0

    # Streams, as the ledger sees them.

    def current(self, device):
        return None

    def tie(self, alias, device, stream):
        pass

    def is_capturing(self):
        return False

    def give_back(self):
        self.allocator.empty_cache()

    # The program.

    def allocate(self, size):
        block = self.allocator.allocate(size)
        self.most = max(self.most, self.allocator.allocated)
        return block

    def tensor(self, size):
        if self._resets and self._random.random() < self._resets / 20:
            self.allocator.peak = self.allocator.allocated
        return Tensor(Storage(self, size), size)

    def save(self, tensor):
        alias, ledger = Tensor(tensor.data, tensor.size), self.ledger
        if tensor.data._cdata in ledger.fixed:
            return None, alias, tensor.size
        entry = ledger.entry_for(tensor.data, 0, 0, None)
        ledger.show(entry, alias, None)
        ledger.enforce()
        return entry, alias, tensor.size

    def save_more(self, step, tensor):
        step.append(self.save(tensor))

    def use(self, step):
        for entry, alias, _ in step:
            if entry is not None:
                self.ledger.use(entry, None)
            assert isinstance(alias.data, Storage), "what backward reads is there"

    def done(self, step):
        step.clear()

    def begin_update(self):
        self.ledger.begin_update()

    def end_step(self):
        self.ledger.settle()
        self.ledger.end_step()


@contextlib.contextmanager
def memory_of(job):
    """What the ledger takes from PyTorch comes from the model."""
    functions = {
        "new_storage": lambda nbytes, device: Storage(job, nbytes // MIB),
        "view_of": lambda storage, like, geometry: storage,
        "revive": lambda weak: weak(),
        "expired": lambda weak: weak() is None,
        "forget": lambda weak: None,
    }
    with contextlib.ExitStack() as stack:
        for name, function in functions.items():
            stack.enter_context(mock.patch.object(residency, name, function))
        yield


def train(budget, steps=8, layers=8, resets=0.0, seed=1):
    """(refused, in DDR at most, moved, allocated at most) of each step. `resets`: how often the program sets PyTorch's peak back."""
    job = Job(budget - CONTEXT, random.Random(seed), resets)
    gpt, allocator, seen = Gpt(job, layers), job.allocator, []
    with memory_of(job):
        for _ in range(steps):
            refused, moved = allocator.refusals, job.stash.moved
            job.budget.overflow_peak = job.most = 0
            gpt.step()
            seen.append((allocator.refusals - refused, job.budget.overflow_peak // MIB, job.stash.moved - moved, job.most))
    assert not job.ledger.failures
    return seen


class Fits(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.peak = train(1 << 20, steps=2)[-1][3] + CONTEXT

    def test_what_fits_does_not_move(self):
        for refused, overflow, moved, _ in train(self.peak * 125 // 100)[1:]:
            self.assertEqual((refused, overflow, moved), (0, 0, 0))

    def test_a_budget_is_filled_and_not_passed(self):
        for share in (90, 80, 70, 60):
            for resets in (0.0, 0.2, 1.0):
                budget = self.peak * share // 100
                seen = train(budget, resets=resets)
                for refused, overflow, moved, most in seen[5:]:
                    where = f"{share}%, {resets}: {seen}"
                    self.assertLessEqual(overflow, budget // 50, where)
                    self.assertLessEqual(refused, 24, where)
                    self.assertLessEqual(most + CONTEXT, budget, where)
                    self.assertGreaterEqual(most + CONTEXT, 0.9 * budget, where)
                    self.assertLessEqual(moved / 2, self.peak - 0.9 * budget, where)

    def test_a_budget_that_is_too_small_goes_on_in_ddr(self):
        needed = 9 * 1000 + CONTEXT  # the weights, their moments, and the tensors of the loss
        seen = train(needed)
        self.assertGreater(seen[-1][1], 0)
        self.assertLess(seen[-1][1], self.peak - needed, "no more than what cannot leave")


if __name__ == "__main__":
    unittest.main()
