"""Two processes share a device's budget through the daemon: one gives way to the other, and both have their own losses."""

import json
import subprocess
import unittest

from programs import PYTHON, Place

MIB = 1 << 20
BUDGET = 24 * MIB  # of the device; each process alone would hold 22

# Trains, and notes after each change what it holds of the device beside what the other one does.
SHARER = """
import json, mmap, struct, sys, time, torch
torch.set_num_threads(1)
import terrace.torch
from terrace.torch.residency import Ledger
from terrace.torch.lease import Lease
me, page_file, seed = int(sys.argv[1]), sys.argv[2], int(sys.argv[1])
with open(page_file, "r+b") as file:
    page = mmap.mmap(file.fileno(), 64)
most = [0]

def note(held):
    struct.pack_into("<Q", page, 8 * me, held)
    most[0] = max(most[0], sum(struct.unpack_from("<QQ", page, 0)))

def watched(original):
    def call(ledger, *arguments):
        original(ledger, *arguments)
        note(ledger._idle())
    return call

Ledger.enforce, Ledger.use = watched(Ledger.enforce), watched(Ledger.use)
give_way = Lease.give_way
def giving(lease, used, needed):
    note(used)  # before the other one may take it
    give_way(lease, used, needed)
Lease.give_way = giving

def flag(value):
    page[16 + me] = value

torch.manual_seed(seed)
x = torch.randn(512, 1024, requires_grad=True)
losses = []
for step in range(60):
    y = x * 1
    for _ in range(10):
        y = (y * 1.01).sin()
    y.sum().backward()
    losses.append(float(y.detach().sum()).hex())
    del y
    if step == 2:
        flag(1)
        deadline = time.monotonic() + 20
        while not all(page[16:18]) and time.monotonic() < deadline and me == 0:
            (x * 1).sin().sum().backward()  # at work until the other one is there
    if step >= 5 and all(page[16:18]):
        break
figures = terrace.torch.figures()
note(0)
print(json.dumps(dict(losses=losses[:6], most=most[0], given_way=figures.get("given_way", 0),
                      restored=figures.get("restored_bytes", 0), grad=float(x.grad.sum()) if me == 1 else 0)))
"""
PLAIN = """
import json, sys, torch
torch.set_num_threads(1)
torch.manual_seed(int(sys.argv[1]))
x = torch.randn(512, 1024, requires_grad=True)
y = x * 1
for _ in range(10):
    y = (y * 1.01).sin()
print(float(y.detach().sum()).hex())
"""


class Sharing(unittest.TestCase):
    def test_the_sum_stays_within_the_budget_and_both_train(self):
        with Place() as place:
            policy = place.write("shared.toml", f'version = 1\n[hbm]\nbudget = "{BUDGET // MIB}MiB"\nreserve = "0"\n'
                                                '[ddr]\nbudget = "256MiB"\nhugepages = false\n')
            page = place.path / "page"
            page.write_bytes(bytes(64))
            script = place.write("share.py", SHARER)
            plain = [place.plain([PYTHON, place.write("plain.py", PLAIN), str(me)]).stdout.strip() for me in (0, 1)]
            running = []
            for me in (0, 1):
                running.append(subprocess.Popen(place.command([PYTHON, script, str(me), str(page)], policy),
                                                env=place.environment(), cwd=place.path, stdout=subprocess.PIPE,
                                                stderr=subprocess.PIPE, text=True))
                while me == 0 and not page.read_bytes()[16] and running[0].poll() is None:
                    pass  # the first has all of it when the second comes
            ends = [process.communicate(timeout=100) for process in running]
            said = "\n".join(err for _, err in ends)
            self.assertEqual([process.returncode for process in running], [0, 0], said)
            figures = [json.loads(out.splitlines()[-1]) for out, _ in ends]
            for me in (0, 1):
                self.assertEqual(set(figures[me]["losses"]), {plain[me]}, said)
                self.assertLessEqual(figures[me]["most"], BUDGET)
            self.assertGreater(figures[0]["given_way"], 0, said)
            self.assertGreater(sum(f["restored"] for f in figures), 0, "together they need more than there is")


if __name__ == "__main__":
    unittest.main()
