"""Budgets that fit: a GPT over a model of PyTorch's allocator and of the wall, with the schedule and the budget as they are."""

import random
import unittest
import weakref

from allocator_model import MIB, CachingAllocator, Gpt, WallLease
from terrace.torch.budget import DeviceBudget, Standing
from terrace.torch.schedule import Schedule

CONTEXT = 600
RECENT = 4


class Tensor:
    """Held by a program; its block goes with it, and when it is saved with whatever saved it."""

    def __init__(self, job, size):
        self.job, self.size, self.block = job, size, job.allocate(size)

    def __del__(self):
        self.job.allocator.free(self.block)


class Job:
    """What the ledger does: saves, sends away what is used last, and brings back what is next."""

    def __init__(self, limit, random_, resets):
        self.allocator = CachingAllocator(limit)
        self.lease = WallLease(self.allocator, CONTEXT)
        self.budget = DeviceBudget(self.allocator, self.lease)
        self._random, self._resets = random_, resets
        self.schedule = Schedule()
        self.saved = {}  # number: [tensor or None, size, how often it was saved]
        self.numbers = weakref.WeakKeyDictionary()
        self.moved = self.rounds = self.held = self.alive = 0
        self.recent = []
        self.most = 0

    def allocate(self, size):
        block = self.allocator.allocate(size)
        self.most = max(self.most, self.allocator.allocated)
        return block

    def tensor(self, size):
        if self._resets and self._random.random() < self._resets / 20:
            self.allocator.peak = self.allocator.allocated
        return Tensor(self, size)

    def limit(self):
        expected = self.schedule.expected
        return self.budget.limit(Standing(self.held * MIB, 0, self.alive * MIB, self.schedule.place_now,
                                          self.schedule.in_backward, expected.needs if expected else None)) // MIB

    def save(self, tensor):
        number = self.numbers.get(tensor)
        if number is None:
            if not self.saved:
                self.budget.begin_round()
                self.limit()
            number = self.numbers[tensor] = self.schedule.save(tensor.size)
            self.saved[number] = [tensor, tensor.size, 0]
            self.held += tensor.size
            self.alive += tensor.size
            self.budget.note(tensor.size * MIB)
        self.saved[number][2] += 1
        self._leave(self.limit())
        self._relieve()
        self.budget.settled(self.held * MIB)
        return number, tensor.size

    def save_more(self, step, tensor):
        step.append(self.save(tensor))

    def _leave(self, limit):
        order = sorted(self.saved, key=self.schedule.distance, reverse=True)
        for number in order:
            if self.held <= limit:
                return
            entry = self.saved[number]
            if entry[0] is not None and number not in self.recent:
                entry[0] = None  # freed now, or when the program lets go of it
                self.held -= entry[1]
                self.moved += entry[1]

    def _bring(self, number):
        entry = self.saved[number]
        self.budget.made(entry[1] * MIB)
        entry[0] = Tensor(self, entry[1])
        self.held += entry[1]
        self.moved += entry[1]
        self.budget.note(entry[1] * MIB)

    def use(self, step):
        for number, size in step:
            self.schedule.use(number)
            self.recent = (self.recent + [number])[-RECENT:]
            self.budget.note(size * MIB)
            if self.saved[number][0] is None:
                self._leave(max(0, self.limit() - size))
                self._bring(number)
            self._leave(self.limit())
            self._relieve()
            for upcoming in self.schedule.order():
                entry = self.saved.get(upcoming)
                if entry is not None and entry[0] is None and not self.schedule.was_used(upcoming):
                    if self.held + entry[1] > self.limit():
                        break
                    self._bring(upcoming)
            self.budget.settled(self.held * MIB)
        return True

    def done(self, step):
        for number, size in step:
            entry = self.saved[number]
            entry[2] -= 1
            if entry[2] == 0:
                del self.saved[number]
                self.held -= size if entry[0] is not None else 0
                self.alive -= size
        if not self.saved:
            expected = self.schedule.expected
            at = Standing(self.held * MIB, 0, 0, self.schedule.place_now, True, expected.needs if expected else None)
            self.schedule.end(self.budget.end_round(at))
            self.recent = []

    def end_step(self):
        self.budget.end_step()
        self._relieve()

    def _relieve(self):
        if self.budget.wants_cache_back():
            self.allocator.empty_cache()
            self.budget.cache_went_back()


def train(budget, steps=8, layers=8, resets=0.0, seed=1):
    """(refused, in DDR at most, moved, allocated at most) of each step. `resets`: how often the program sets PyTorch's peak back."""
    job = Job(budget - CONTEXT, random.Random(seed), resets)
    gpt, allocator, seen = Gpt(job, layers), job.allocator, []
    for _ in range(steps):
        refused, moved = allocator.refusals, job.moved
        job.budget.overflow_peak = job.most = 0
        gpt.step()
        seen.append((allocator.refusals - refused, job.budget.overflow_peak // MIB, job.moved - moved, job.most))
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
                    self.assertLessEqual(refused, 12, where)
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
