"""Runs a training script whose steps wait for their turn, so that others may load and build meanwhile.

    python turn.py FILE NEXT SCRIPT [ARGUMENTS]

The script waits when it has made its optimizer, until FILE exists. Where it came to its end NEXT is made.
"""

import os
import runpy
import sys
import time

import torch


def wait_for(file):
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    while not os.path.exists(file):
        time.sleep(0.002)


def main():
    file, following, *sys.argv = sys.argv[1:]
    init = torch.optim.Optimizer.__init__

    def initialised(optimizer, *args, **kwargs):
        init(optimizer, *args, **kwargs)
        wait_for(file)

    torch.optim.Optimizer.__init__ = initialised
    runpy.run_path(sys.argv[0], run_name="__main__")
    open(following, "wb").close()


if __name__ == "__main__":
    main()
