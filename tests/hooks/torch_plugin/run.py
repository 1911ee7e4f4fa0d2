"""Runs one test module of this folder; says so and passes where this Python has no PyTorch."""

import importlib
import sys
import unittest

try:
    import torch
except ImportError as error:
    print(f"{sys.executable} has no PyTorch ({error}); python3-torch, or -DTERRACE_TEST_PYTHON=PYTHON. Skipped")
    sys.exit(0)

torch.set_num_threads(1)
result = unittest.TextTestRunner(stream=sys.stdout, verbosity=1).run(
    unittest.defaultTestLoader.loadTestsFromModule(importlib.import_module(sys.argv[1])))
sys.exit(0 if result.wasSuccessful() and result.testsRun > 0 else 1)
