"""What is learned of a round, and which saves leave: pure, without tensors."""

import unittest

from terrace.torch.schedule import Round, Schedule, choose_victims


def follow(schedule, sizes, uses):
    for nbytes in sizes:
        schedule.save(nbytes)
    for save in uses:
        schedule.use(save)
    schedule.end()


class Victims(unittest.TestCase):
    def test_none_where_all_fits(self):
        self.assertEqual(choose_victims(Round([4, 4, 4], [2, 1, 0]), 12), set())

    def test_those_used_last_and_no_more_than_needed(self):
        self.assertEqual(choose_victims(Round([4, 4, 4], [2, 1, 0]), 8), {0})
        self.assertEqual(choose_victims(Round([4, 4, 4], [0, 1, 2]), 8), {2})
        self.assertEqual(choose_victims(Round([4, 4, 4], [2, 1, 0]), 7), {0, 1})
        self.assertEqual(choose_victims(Round([4, 4, 4], [2, 1, 0]), 0), {0, 1, 2})

    def test_what_backward_never_reads_leaves_first(self):
        self.assertEqual(choose_victims(Round([4, 4, 4], [1, 0]), 8), {2})


class Learning(unittest.TestCase):
    def test_before_anything_is_known_the_last_saved_is_expected_first(self):
        schedule = Schedule()
        for _ in range(3):
            schedule.save(1)
        self.assertEqual(list(schedule.order()), [2, 1, 0])
        self.assertEqual([schedule.place(save) for save in (2, 1, 0)], [0, 1, 2])
        self.assertGreater(schedule.distance(0), schedule.distance(2))

    def test_a_round_is_expected_as_it_was(self):
        schedule = Schedule()
        follow(schedule, [1, 2, 3], [1, 2, 0])
        for nbytes in (1, 2, 3):
            schedule.save(nbytes)
        self.assertEqual(list(schedule.order()), [1, 2, 0])
        self.assertEqual([schedule.place(save) for save in (1, 2, 0, 9)], [0, 1, 2, 3])
        self.assertLess(schedule.distance(1), schedule.distance(0))
        self.assertEqual(schedule.changes, 0)

    def test_another_shape_is_noticed_and_learned(self):
        schedule = Schedule()
        follow(schedule, [1, 2, 3], [2, 1, 0])
        follow(schedule, [1, 9, 3], [0, 1, 2])
        self.assertEqual(schedule.changes, 1)
        schedule.save(1)
        schedule.save(9)
        schedule.save(3)
        self.assertEqual(list(schedule.order()), [0, 1, 2])

    def test_two_kinds_of_round_in_turns_are_both_known(self):
        schedule = Schedule()
        for _ in range(3):
            follow(schedule, [1, 2], [1, 0])
            follow(schedule, [5, 6, 7], [0, 2, 1])
        self.assertEqual(schedule.changes, 1)  # the first time that the second kind came
        schedule.save(1)
        schedule.save(2)
        self.assertEqual(schedule.expected.uses, (1, 0))

    def test_a_forward_without_backward_teaches_nothing(self):
        schedule = Schedule()
        follow(schedule, [1, 2], [1, 0])
        follow(schedule, [1, 2], [])
        self.assertEqual(schedule.expected.uses, (1, 0))

    def test_known_rounds_are_bounded(self):
        schedule = Schedule()
        for nbytes in range(1, 40):
            follow(schedule, [nbytes], [0])
        self.assertLessEqual(len(schedule.known), 8)


if __name__ == "__main__":
    unittest.main()
