"""What a device's budget leaves for saved tensors: pure, over an allocator that says what the test wants."""

import unittest

from terrace.torch.budget import DeviceBudget, FixedBudget

GIB = 1 << 30


class Memory:
    def __init__(self):
        self.now = self.most = 0

    def set(self, nbytes):
        self.now = nbytes
        self.most = max(self.most, nbytes)

    def allocated(self):
        return self.now

    def reserved(self):
        return self.now + GIB

    def peak(self):
        return self.most


class Lease:
    def __init__(self, nbytes):
        self.nbytes = nbytes
        self.used = 0

    def limit(self):
        return self.nbytes


class Budgets(unittest.TestCase):
    def setUp(self):
        self.memory = Memory()
        self.lease = Lease(100 * GIB)
        self.budget = DeviceBudget(self.memory, self.lease)

    def limit(self, held, allocated, in_backward=False, states=0):
        self.memory.set(allocated)
        self.budget.note(1 << 40)
        return self.budget.limit(held, states, in_backward) / GIB

    def test_a_fixed_one_is_what_it_is(self):
        self.assertEqual(FixedBudget(7, self.lease).limit(100, 1, True), 7)
        self.assertEqual(FixedBudget(1 << 60, self.lease).limit(0, 10 * GIB, True), 90 * GIB, "and the lease binds")

    def test_before_a_round_is_known_some_of_it_stays_free(self):
        self.budget.begin_round()
        self.assertAlmostEqual(self.limit(0, 40 * GIB), 100 - 2 - 8 - 40, places=5)
        self.assertAlmostEqual(self.limit(20 * GIB, 60 * GIB), 50, places=5)

    def test_a_round_has_one_limit_from_its_first_save_on(self):
        self.budget.begin_round()
        self.limit(0, 40 * GIB)
        self.limit(30 * GIB, 80 * GIB)  # others were 50 at most
        self.memory.set(83 * GIB)  # and an operator's 3, that no reading saw
        self.memory.set(10 * GIB)
        self.budget.end_round()
        self.budget.begin_round()
        self.assertAlmostEqual(self.limit(0, 40 * GIB), 100 - 2 - 50 - 3, places=5)

    def test_in_backward_gradients_count_as_they_come(self):
        self.budget.begin_round()
        self.limit(40 * GIB, 80 * GIB)
        self.assertAlmostEqual(self.limit(40 * GIB, 80 * GIB, in_backward=True), 50, places=5)
        self.assertAlmostEqual(self.limit(10 * GIB, 70 * GIB, in_backward=True), 30, places=5)
        self.budget.end_round()
        self.budget.begin_round()
        self.assertGreaterEqual(self.limit(0, 40 * GIB), 50, "those of the end are not there at the beginning")

    def test_a_peak_of_the_update_is_none_of_the_round(self):
        self.budget.begin_round()
        self.limit(0, 40 * GIB)
        self.budget.end_round()
        self.memory.set(95 * GIB)
        self.memory.set(40 * GIB)
        self.budget.begin_round()
        before = self.limit(0, 40 * GIB)
        self.budget.end_round()
        self.budget.begin_round()
        self.assertAlmostEqual(self.limit(0, 40 * GIB), before, places=5)

    def test_optimizer_state_on_its_way_takes_room_until_it_has_left(self):
        self.budget.begin_round()
        self.assertAlmostEqual(self.limit(0, 60 * GIB, states=20 * GIB), 100 - 2 - 8 - 40 - 20, places=5)
        self.assertAlmostEqual(self.limit(0, 40 * GIB, states=0), 100 - 2 - 8 - 40, places=5)

    def test_it_follows_the_lease_and_what_is_held_outside_of_pytorch(self):
        self.budget.begin_round()
        self.limit(0, 40 * GIB)
        self.budget.end_round()  # nothing unseen
        self.budget.begin_round()
        self.assertAlmostEqual(self.limit(0, 40 * GIB), 100 - 2 - 40, places=5)
        self.lease.nbytes = 60 * GIB
        self.assertAlmostEqual(self.limit(0, 40 * GIB), 60 - 1.2 - 40, places=5)
        self.lease.used = 44 * GIB  # 41 of them are PyTorch's
        self.limit(0, 40 * GIB)
        self.assertAlmostEqual(self.limit(0, 40 * GIB), 60 - 1.2 - 40 - 3, places=5)

    def test_what_a_round_needs_is_known_when_one_has_run(self):
        self.budget.begin_round()
        self.assertIsNone(self.budget.needed())
        self.limit(10 * GIB, 50 * GIB)
        self.memory.set(53 * GIB)
        self.memory.set(10 * GIB)
        self.budget.end_round()
        self.assertEqual(self.budget.needed(), int(43 * GIB * 1.02))

    def test_it_is_never_negative(self):
        self.budget.begin_round()
        self.assertEqual(self.limit(0, 200 * GIB), 0)

    def test_roomy_is_less_than_nine_tenths(self):
        self.memory.set(89 * GIB)
        self.assertTrue(self.budget.is_roomy())
        self.memory.set(91 * GIB)
        self.assertFalse(self.budget.is_roomy())


if __name__ == "__main__":
    unittest.main()
