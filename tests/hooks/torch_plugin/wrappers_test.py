"""What the plugin stands in front of, one by one, without a stash."""

import queue
import unittest
from unittest import mock

import torch
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


if __name__ == "__main__":
    unittest.main()
