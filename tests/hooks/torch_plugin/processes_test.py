"""Processes that end in any way, fork, and have workers."""

import unittest

from programs import PYTHON, TRAINING, Place

# Work with autograd in a loader's worker: as large as what moves elsewhere.
LOADER = """
import sys, torch
from torch.utils.data import DataLoader, Dataset

class Computed(Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        x = torch.full((512, 1024), 1.0 + index, requires_grad=True)
        y = x * 1
        for _ in range(6):
            y = (y * 1.01).sin()
        y.sum().backward()
        terrace = sys.modules.get("terrace.torch")
        return float(x.grad.sum()), terrace.figures().get("spills", 0) if terrace else -1

if __name__ == "__main__":
    torch.set_num_threads(1)
    x = torch.ones(512, 1024, requires_grad=True)
    y = x * 1
    for _ in range(10):
        y = (y * 1.01).sin()
    loss = y.sum()
    del y
    # Workers start while a graph is half in DDR.
    for how in ("fork", "spawn"):
        rows = list(DataLoader(Computed(), num_workers=2, multiprocessing_context=how, batch_size=1))
        print(how, [float(row[0]) for row in rows] == [Computed()[i][0] for i in range(4)],
              [int(row[1]) for row in rows])
    loss.backward()
    print("terrace", sys.modules["terrace.torch"].figures()["restored_bytes"] > 0)
"""

FORK = """
import os, sys, torch
torch.set_num_threads(1)
import terrace.torch

def work():
    x = torch.ones(512, 1024, requires_grad=True)
    y = x * 1
    for _ in range(10):
        y = (y * 1.01).sin()
    return x, y.sum()

x, loss = work()
before = terrace.torch.figures()["spills"]
assert before > 0
child = os.fork()
if child == 0:
    mine, inner = work()
    inner.backward()  # nothing of it moves
    try:
        loss.backward()  # what is in DDR is the parent's
    except RuntimeError as error:
        os._exit(7 if "parent of a forked process" in str(error) else 8)
    os._exit(9)
_, status = os.waitpid(child, 0)
loss.backward()
y, again = work()
again.backward()
print(os.WEXITSTATUS(status), torch.equal(x.grad, y.grad), terrace.torch.figures()["spills"] > before)
"""


class Processes(unittest.TestCase):
    def setUp(self):
        self.place = Place()
        self.place.__enter__()
        self.addCleanup(self.place.__exit__)

    def ends(self, ending):
        return self.place.run([PYTHON, self.place.write("train.py", TRAINING + ending)])

    def test_every_way_out_is_the_programs_own(self):
        for ending, code in (("\nsys.exit(5)\n", 5), ("\nimport os\nsys.stdout.flush()\nos._exit(3)\n", 3),
                             ("\nraise KeyError('mine')\n", 1),
                             ("\nimport os, signal\nsys.stdout.flush()\nos.kill(os.getpid(), signal.SIGTERM)\n", 143)):
            run = self.ends(ending)
            self.assertEqual(run.returncode, code, run.stderr)
            self.assertEqual(run.stdout.splitlines()[-1], "terrace True", run.stderr)
            self.assertEqual("KeyError: 'mine'" in run.stderr, code == 1)
            if code in (5, 1):
                self.assertIn("terrace: torch: 3 rounds", run.stderr, "the report comes whatever the code")

    def test_an_exit_with_a_graph_half_in_ddr(self):
        run = self.ends("\nz = x * 1\nfor _ in range(10):\n    z = (z * 1.01).sin()\nkept = z.sum()\n")
        self.assertEqual((run.returncode, run.stderr.count("Traceback")), (0, 0), run.stderr)

    def test_loader_workers_never_spill(self):
        run = self.place.run([PYTHON, self.place.write("loader.py", LOADER)])
        self.assertEqual(run.stdout.splitlines(), ["fork True [0, 0, 0, 0]", "spawn True [0, 0, 0, 0]", "terrace True"],
                         run.stderr)

    def test_a_forked_child_works_without(self):
        run = self.place.run([PYTHON, self.place.write("fork.py", FORK)])
        self.assertEqual(run.stdout, "7 True True\n", run.stderr)


if __name__ == "__main__":
    unittest.main()
