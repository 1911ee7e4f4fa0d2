"""The plugin's end, rounds that have none of their own, and hooks that others put on top."""

import unittest
from unittest import mock

import torch
from torch import nn

import models
import terrace.torch.saved_tensors
from stack import BATCH, LAYER, LAYERS, WEIGHTS, adamw, away, budget, layers, ledger, train, whole_weights


class End(unittest.TestCase):
    def test_a_step_that_somebody_kept_goes_on_behind_it(self):
        def run(plugins):
            model = layers()
            optimizer = step = None
            seen = []
            for plugin in plugins:
                with plugin():
                    if optimizer is None:
                        optimizer = adamw(model)
                        step = optimizer.step  # as a scheduler keeps it
                    for _ in range(2):
                        seen.append(model(BATCH).pow(2).mean())
                        seen[-1].backward()
                        step()
                        optimizer.zero_grad(set_to_none=True)
                        seen[-1] = seen[-1].detach()
            return seen + whole_weights(model)

        def without():
            return mock.patch.dict({})

        def short():
            return budget(WEIGHTS)

        plain = run([without] * 3)
        for plugins in ([short, without, without], [short, without, short], [short, short, without]):
            self.assertTrue(models.same(run(plugins), plain), [p.__name__ for p in plugins])


if __name__ == "__main__":
    torch.set_num_threads(1)
    unittest.main()
