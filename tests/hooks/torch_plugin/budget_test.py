"""What a device's budget leaves for saved tensors: pure, over an allocator that says what the test wants."""

import os
import queue
import threading
import unittest
from unittest import mock

import torch

from terrace.torch.allocator import GrowingSegments, Reading
from terrace.torch.budget import DeviceBudget, FixedBudget, Standing
from terrace.torch.overflow_watch import OverflowWatch
from terrace.torch.residency import Ledger
from terrace.torch.round_needs import RoundNeeds
from terrace.torch.schedule import Schedule

GIB = 1 << 30
USABLE = 100 * (1 - DeviceBudget.SPARE)  # GiB


class Memory:
    def __init__(self):
        self.now = self.most = self.ever = 0
        self.short = 0

    def set(self, nbytes):
        self.ever += max(0, nbytes - self.now)
        self.now = nbytes
        self.most = max(self.most, nbytes)

    def read(self):
        return Reading(self.now, self.most, self.now + GIB, self.ever)

    def reset_peak(self):
        self.most = self.now

    def is_short(self):
        self.short += 1
        return True


class Lease:
    def __init__(self, nbytes):
        self.nbytes = nbytes
        self.used = self.overflow = self.refusals = 0

    def limit(self):
        return self.nbytes

    def refresh(self):
        pass


class Budgets(unittest.TestCase):
    def setUp(self):
        self.memory = Memory()
        self.lease = Lease(100 * GIB)
        self.budget = DeviceBudget(self.memory, self.lease)
        self.needs = None  # what is known of the round that runs

    def at(self, held=0, states=0, alive=None, place=0, in_backward=False):
        return Standing(held, states, held if alive is None else alive, place, in_backward, self.needs)

    def limit(self, held, allocated, **more):
        self.memory.set(allocated)
        self.budget.note(DeviceBudget.READ_EVERY)
        left = self.budget.limit(self.at(held, **more)) / GIB
        self.budget.settled(held)
        return left

    def end(self, **more):
        self.memory.set(40 * GIB)
        self.needs = self.budget.end_round(self.at(in_backward=True, **more))
        return self.needs

    def test_a_fixed_one_is_what_it_is(self):
        self.assertEqual(FixedBudget(7, self.lease).limit(self.at(100, states=1)), 7)
        self.assertEqual(FixedBudget(1 << 60, self.lease).limit(self.at(states=10 * GIB)), 90 * GIB, "and the lease binds")

    def test_before_a_round_is_known_most_of_it_stays_free(self):
        self.budget.begin_round()
        self.assertAlmostEqual(self.limit(0, 39 * GIB), (USABLE - 39) / 3, places=5)
        self.assertAlmostEqual(self.limit(20 * GIB, 59 * GIB), (USABLE - 39) / 3, places=5)
        self.assertLess(self.limit(30 * GIB, 45 * GIB), 30)
        self.assertEqual(self.memory.short, 0, "something leaves, out of care")
        self.limit(25 * GIB, 80 * GIB)
        self.assertEqual(self.memory.short, 1, "for want of memory")

    def test_at_first_tensors_as_large_as_the_largest_find_room(self):
        self.budget.begin_round()
        self.budget.note(18 * GIB)
        self.memory.set(40 * GIB)
        self.assertAlmostEqual(self.budget.limit(self.at()) / GIB, USABLE - 40 - 3 * 18, places=5)

    def test_a_known_round_leaves_what_the_last_one_needed_from_its_first_save_on(self):
        self.budget.begin_round()
        self.limit(10 * GIB, 50 * GIB, place=0)
        self.limit(10 * GIB, 60 * GIB, place=1)  # others are 50
        self.memory.set(64 * GIB)  # and an operator's 4, that no reading sees
        self.memory.set(50 * GIB)
        self.limit(10 * GIB, 50 * GIB, place=2, in_backward=True)
        self.end(place=3)
        self.budget.begin_round()
        self.assertAlmostEqual(self.limit(0, 40 * GIB, place=0), USABLE - 54, places=5)
        self.assertAlmostEqual(self.limit(30 * GIB, 80 * GIB, place=1), USABLE - 54, places=5)
        self.assertGreater(self.limit(30 * GIB, 70 * GIB, place=2, in_backward=True), USABLE - 54)

    def learn_an_operator(self, reset):
        """A round in which an operator took 3 GiB. The peak was higher before."""
        self.memory.set(90 * GIB)
        self.memory.set(40 * GIB)
        self.budget.begin_round()
        reset(0)
        self.limit(5 * GIB, 45 * GIB, place=0)
        reset(1)
        self.limit(5 * GIB, 45 * GIB, place=1)
        self.memory.set(48 * GIB)
        reset(2)
        self.memory.set(45 * GIB)
        reset(3)
        self.limit(5 * GIB, 45 * GIB, place=2, in_backward=True)
        reset(4)
        return self.end(place=3).most / GIB

    def test_a_program_that_sets_the_peak_back_changes_nothing(self):
        for when in range(-1, 5):
            self.setUp()
            self.assertAlmostEqual(self.learn_an_operator(lambda turn: self.memory.reset_peak() if turn == when else None), 43,
                                   places=5, msg=f"set back at {when}")

    def test_what_comes_back_is_no_operators_need(self):
        self.budget.begin_round()
        self.limit(20 * GIB, 60 * GIB, place=1)
        self.limit(10 * GIB, 50 * GIB, place=2, in_backward=True)
        self.budget.made(10 * GIB)  # behind the reading, by whoever asked for it
        self.memory.set(60 * GIB)
        self.budget.settled(20 * GIB)
        self.limit(20 * GIB, 60 * GIB, place=3, in_backward=True)
        self.assertEqual(self.end(place=4).most, 40 * GIB)

    def test_more_than_the_last_round_held_counts_at_once(self):
        self.budget.begin_round()
        self.limit(0, 40 * GIB)
        self.limit(0, 40 * GIB, place=1, in_backward=True)
        self.end(place=2)
        self.budget.begin_round()
        self.assertAlmostEqual(self.limit(0, 54 * GIB), USABLE - 54, places=5, msg="14 of optimizer state")

    def test_a_peak_of_the_update_is_none_of_the_round(self):
        self.budget.begin_round()
        self.limit(0, 40 * GIB)
        self.limit(0, 40 * GIB, place=1, in_backward=True)
        self.end(place=2)
        self.memory.set(95 * GIB)
        self.memory.set(40 * GIB)
        self.budget.begin_round()
        self.assertAlmostEqual(self.limit(0, 40 * GIB), USABLE - 40, places=5)

    def test_another_round_counts_with_the_operators_of_the_last(self):
        self.learn_an_operator(lambda turn: None)
        self.needs = None
        self.budget.begin_round()
        self.assertAlmostEqual(self.limit(0, 50 * GIB), USABLE - 53, places=5)
        self.assertAlmostEqual(self.limit(9 * GIB, 50 * GIB, in_backward=True), USABLE - 44, places=5)

    def test_optimizer_state_on_its_way_takes_room_until_it_has_left(self):
        self.learn_an_operator(lambda turn: None)
        self.budget.begin_round()
        self.assertAlmostEqual(self.limit(0, 60 * GIB, states=20 * GIB), USABLE - 43 - 20, places=5)
        self.assertAlmostEqual(self.limit(0, 40 * GIB), USABLE - 43, places=5)
        self.assertLess(self.limit(0, 110 * GIB, states=70 * GIB), 0, "so much has to leave")

    def test_it_follows_the_lease_and_what_is_held_outside_of_pytorch(self):
        self.learn_an_operator(lambda turn: None)
        self.budget.begin_round()
        self.lease.nbytes = 60 * GIB
        self.assertAlmostEqual(self.limit(0, 40 * GIB), 0.6 * USABLE - 43, places=5)
        self.lease.used = 44 * GIB  # 41 of them are PyTorch's
        self.assertAlmostEqual(self.limit(0, 40 * GIB), 0.6 * USABLE - 43 - 3, places=5)
        self.lease.overflow, self.lease.used = 6 * GIB, 38 * GIB  # 35 of them are
        self.assertAlmostEqual(self.limit(0, 40 * GIB), 0.6 * USABLE - 43 - 3, places=5)

    def known_round(self, refusals, overflow, peak):
        self.budget.begin_round()
        self.limit(10 * GIB, 50 * GIB)
        self.memory.set(peak)
        self.lease.refusals += refusals
        self.lease.overflow = overflow
        self.limit(10 * GIB, 50 * GIB, place=1, in_backward=True)
        self.lease.overflow = 0
        self.end(place=2)
        self.budget.begin_round()
        free = self.limit(0, 40 * GIB) + self.needs.wanted(0, 0) / GIB
        self.end(place=2)
        return free

    def test_fragments_leave_more_free_where_bytes_would_have_fitted(self):
        self.learn_an_operator(lambda turn: None)
        free = [self.known_round(*seen) for seen in (
            (2, 0, 99 * GIB), (2, 0, 99 * GIB),  # a few refusals: PyTorch helped itself
            (3, 0, 99 * GIB), (0, 2 * GIB, 99 * GIB),
            (4, 5 * GIB, 105 * GIB),  # that did not fit
            (9, 90 * GIB, 99 * GIB))]
        self.assertEqual([round(USABLE - f, 3) for f in free], [0, 0, 0, 2, 2, 12])

    def test_refusals_in_round_after_round_leave_a_little_more_free(self):
        self.learn_an_operator(lambda turn: None)
        slack = []
        for _ in range(5):
            self.budget.begin_round()
            slack.append(round(USABLE - self.limit(5 * GIB, 45 * GIB) - self.needs.wanted(0, 0) / GIB, 3))
            self.lease.refusals += 5
            self.end(place=2)
        self.assertEqual(slack, [0, 0, 1, 2, 2])

    def asked_for_cache(self, looks, after):
        """At which looks. `after`: what lies in DDR once the cache went back."""
        asked = []
        for look in range(looks):
            self.limit(0, 10 * GIB)
            if self.budget.wants_cache_back():
                asked.append(look)
                self.lease.overflow = after
                self.budget.cache_went_back()
                self.lease.overflow = 2 * GIB
        return asked

    def test_cache_in_ddr_goes_back_as_long_as_that_helps(self):
        self.budget.begin_round()
        self.assertEqual(self.asked_for_cache(4, 0), [], "nothing lies there")
        self.lease.overflow = 8 * GIB
        self.assertEqual(self.asked_for_cache(4, 0), [], "and hardly anything is cached")
        self.lease.overflow = 2 * GIB
        self.assertEqual(self.asked_for_cache(4, 0), [0, 1, 2, 3])
        self.assertEqual(self.asked_for_cache(20, 2 * GIB), [0, 3, 8, 17], "in use")
        self.budget.end_step()
        self.assertFalse(self.budget.wants_cache_back())
        self.lease.overflow = 0
        self.budget.end_step()
        self.lease.overflow = GIB
        self.budget.end_step()
        self.assertTrue(self.budget.wants_cache_back())

    def test_refusals_are_the_first_sign_of_pressure(self):
        self.budget.begin_round()
        self.lease.refusals = 1
        self.limit(0, 10 * GIB)
        self.assertEqual(self.memory.short, 1)
        self.assertTrue(self.budget.wants_cache_back(), "of ordinary segments")

    def test_what_a_round_needs_is_known_when_one_has_run(self):
        self.assertIsNone(self.budget.needed())
        self.learn_an_operator(lambda turn: None)
        self.assertEqual(self.budget.needed(), int(43 * GIB * (1 + DeviceBudget.SPARE)))

    def test_roomy_is_less_than_nine_tenths(self):
        self.memory.set(89 * GIB)
        self.assertTrue(self.budget.is_roomy())
        self.memory.set(91 * GIB)
        self.assertFalse(self.budget.is_roomy())


class Needs(unittest.TestCase):
    def round_(self, *rows):
        needs = RoundNeeds()
        for row in rows:
            needs.add(*row)
        needs.close()
        return needs

    def test_in_forward_the_most_that_comes(self):
        needs = self.round_((0, 2, 5, 0, False), (1, 2, 3, 4, False), (2, 2, 4, 8, True))
        self.assertEqual([needs.wanted(0, 0), needs.wanted(1, 4)], [5, 4])

    def test_in_backward_what_is_done_with_makes_room_for_gradients(self):
        needs = self.round_((0, 2, 3, 8, False), (1, 2, 3, 8, True), (2, 6, 7, 4, True), (3, 9, 10, 0, True))
        self.assertEqual(needs.wanted(0, 8), 3)
        self.assertEqual([needs.wanted(place, alive) for place, alive in ((1, 8), (2, 4), (3, 0), (9, 0))], [3, 7, 10, 10])
        self.assertEqual(needs.wanted(2, 3), 8, "one more has gone")

    def test_where_nobody_looked_nothing_is_compared(self):
        needs = self.round_((0, 2, 3, 0, False), (4, 3, 5, 0, True))
        self.assertEqual([needs.others(place) for place in (0, 1, 4)], [2, None, 3])
        self.assertEqual([needs.passing_at(place) for place in (0, 1, 4)], [1, None, 2])
        self.assertEqual([needs.passing(place) for place in (0, 3, 4, 9)], [2, 2, 2, 2])

    def test_an_empty_round_needs_nothing(self):
        needs = self.round_()
        self.assertEqual((needs.wanted(3, 1), needs.passing(0), needs.others(0), needs.most), (0, 0, None, 0))


class Segments(unittest.TestCase):
    """PyTorch's own functions stand in for those of a CUDA device."""

    def begin(self, environment=(), said="", backend="native", capturing=False, refuse=None):
        told = []

        def change(text):
            told.append(text)
            if refuse is not None:
                raise refuse

        with mock.patch.dict(os.environ, dict(environment)), \
                mock.patch.object(torch._C, "_accelerator_getAllocatorSettings", lambda: said, create=True), \
                mock.patch.object(torch._C, "_accelerator_setAllocatorSettings", change, create=True), \
                mock.patch.object(torch.cuda, "get_allocator_backend", lambda: backend, create=True), \
                mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: capturing):
            segments = GrowingSegments()
            on = segments.begin()
            self.assertEqual(segments.on, on)
            segments.begin()
            segments.end()
            segments.begin()
        return on, told

    def test_they_grow_from_the_first_pressure_until_somebody_needs_others(self):
        self.assertEqual(self.begin(), (True, ["expandable_segments:True", "expandable_segments:False"]))

    def test_they_are_the_users_who_has_decided(self):
        for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
            self.assertEqual(self.begin({name: "max_split_size_mb:512"}), (False, []))
        self.assertEqual(self.begin(said="expandable_segments:False"), (False, []))
        self.assertEqual(self.begin(backend="cudaMallocAsync"), (False, []))

    def test_not_while_a_graph_is_captured(self):
        self.assertEqual(self.begin(capturing=True), (False, []))

    def test_a_pytorch_that_knows_no_such_setting_goes_on(self):
        self.assertEqual(self.begin(refuse=RuntimeError("Unrecognized CachingAllocator option")),
                         (False, ["expandable_segments:True"]))


class Watch(unittest.TestCase):
    def test_it_looks_until_it_is_ended(self):
        looks = queue.SimpleQueue()
        watch = OverflowWatch(lambda: looks.put(threading.current_thread()))
        watch.INTERVAL = 0.001
        watch.begin()
        watch.begin()
        first, second = looks.get(timeout=60), looks.get(timeout=60)
        self.assertIs(first, second, "one thread")
        watch.end()
        self.assertFalse(first.is_alive())
        watch.begin()
        self.assertFalse(first.is_alive(), "for good")

    def test_a_device_that_fails_ends_it(self):
        def fail():
            raise RuntimeError("CUDA error")

        watch = OverflowWatch(fail)
        watch.INTERVAL = 0.001
        watch.begin()
        watch._thread.join(timeout=60)
        self.assertFalse(watch._thread.is_alive())
        watch.end()


class Relief(unittest.TestCase):
    """A ledger whose PyTorch keeps memory, on behalf of a program whose own hooks take what is saved."""

    def setUp(self):
        self.memory, self.lease = Memory(), Lease(100 * GIB)
        self.given_back = 0
        streams = mock.Mock(is_capturing=lambda: False, give_back=self.give_back)
        self.ledger = Ledger(mock.Mock(), torch.device("cpu"), self.lease, DeviceBudget(self.memory, self.lease), Schedule(), streams)

    def give_back(self):
        self.given_back += 1
        self.lease.overflow = 0

    def test_what_lies_in_ddr_and_is_free_goes_back(self):
        self.memory.set(10 * GIB)  # and 1 GiB is cached
        self.lease.overflow = 2 * GIB
        self.ledger.relieve()
        self.assertEqual(self.given_back, 1)

    def test_what_lay_there_unseen_is_want_of_room_until_a_round_is_known(self):
        budget = self.ledger.budget
        self.ledger.relieve()
        self.assertFalse(budget.lacks_room_unseen())
        self.lease.overflow = 2 * GIB
        self.ledger.relieve()
        self.lease.overflow = 0  # it has gone again
        self.assertTrue(budget.lacks_room_unseen())
        budget.begin_round()
        self.assertFalse(budget.lacks_room_unseen(), "saved tensors may leave")
        budget.end_round(Standing(0, 0, 0, 0, True, None))
        self.assertFalse(budget.lacks_room_unseen())

    def test_nothing_goes_back_where_nothing_lies_there_or_most_of_it_is_in_use(self):
        self.memory.set(10 * GIB)
        self.ledger.relieve()
        self.lease.overflow = 5 * GIB
        self.ledger.relieve()
        self.ledger.closed = True
        self.lease.overflow = 2 * GIB
        self.ledger.relieve()
        self.assertEqual(self.given_back, 0)


if __name__ == "__main__":
    unittest.main()
