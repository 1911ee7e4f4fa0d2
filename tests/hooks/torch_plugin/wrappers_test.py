"""What the plugin stands in front of, one by one, without a stash."""

import queue
import threading
import unittest
from unittest import mock

import torch
from terrace.torch.saved_tensors import SavedTensors
from terrace.torch.torch_versions import TELLS_TOP_HOOKS, push_default_hooks
from terrace.torch.wrappers import OTHER_ALLOCATOR, Wrappers


class OtherAllocator(unittest.TestCase):
    def setUp(self):
        self.wrappers = Wrappers()
        self.addCleanup(lambda: self.wrappers.undo())

    def refuse(self, owner, name, error):
        def refusing(*_, **__):
            raise error

        patch = mock.patch.object(owner, name, refusing, create=True)
        patch.start()
        self.addCleanup(patch.stop)
        return refusing

    def test_what_the_backend_refuses_names_the_mode_that_does_not(self):
        said = "cudaMallocAsync does not yet support shareIpcHandle. If you need it, please file an issue"
        refusing = self.refuse(torch.UntypedStorage, "_share_cuda_", RuntimeError(said))
        self.wrappers.name_the_other_allocator()
        for _ in range(2):  # the same error again, said once
            with self.assertRaises(RuntimeError) as caught:
                torch.UntypedStorage(8)._share_cuda_()
            self.assertEqual(str(caught.exception), f"{said}\n{OTHER_ALLOCATOR}")
        self.wrappers.undo()
        self.assertIs(torch.UntypedStorage._share_cuda_, refusing)

    def test_other_errors_are_as_they_were(self):
        for error in (RuntimeError("CUDA error: invalid argument"), queue.Empty("cudaMallocAsync")):
            with self.subTest(error):
                self.refuse(torch.cuda, "memory_snapshot", error)
                self.wrappers.name_the_other_allocator()
                with self.assertRaises(type(error)) as caught:
                    torch.cuda.memory_snapshot()
                self.assertNotIn("terrace", str(caught.exception))
                self.wrappers.undo()


class Threads(unittest.TestCase):
    """What a thread holds of PyTorch's default hooks it lets go when join() has returned: at the end of a process, too
    late."""

    def setUp(self):
        self.weights = mock.Mock(active=False)
        self.saved = SavedTensors(lambda device: None, "cpu", 1 << 20, self.weights)
        self.wrappers = Wrappers()
        self.wrappers.threads_begin_and_end_with(self.saved.install, self.saved.remove)
        self.addCleanup(lambda: self.wrappers.undo())

    def run_whole(self, target):
        """What was installed in the target, and when the thread was about to be over."""
        seen, saved = [], self.saved

        class Watched(threading.Thread):
            def _bootstrap_inner(self):
                super()._bootstrap_inner()
                seen.append(saved.installed)

        with mock.patch.object(threading, "excepthook", lambda args: None):
            thread = Watched(target=lambda: (seen.append(saved.installed), target()))
            thread.start()
            thread.join()
        return seen

    def test_hooks_are_there_from_the_first_line_to_the_last(self):
        self.assertEqual(self.run_whole(lambda: None), [True, False])

    def test_also_where_it_ends_with_an_error(self):
        self.assertEqual(self.run_whole(lambda: 1 // 0), [True, False])

    def test_the_programs_own_hooks_stay_where_they_are(self):
        if not TELLS_TOP_HOOKS:
            self.skipTest("this PyTorch does not tell whose hooks are on top")
        self.assertEqual(self.run_whole(lambda: push_default_hooks(lambda t: t, lambda t: t)), [True, True])


if __name__ == "__main__":
    unittest.main()
