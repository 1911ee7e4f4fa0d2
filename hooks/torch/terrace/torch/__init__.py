"""Terrace in a PyTorch program: what autograd saves, and optimizer state, in DDR where HBM is short.

`terrace run` loads it when a process imports torch. Where it cannot (`python -I`), say `import terrace.torch` before
the model is made; without `terrace run`, `terrace.torch.enable()` too. docs/PYTORCH.md has the whole of it.
"""

import atexit
import os

import torch

from .plugin import Plugin

_plugin = None


def enable(device=None, **settings):
    """Starts tiering in this process. `device`: "cuda", or "emulated" for tensors of the CPU; plugin.Settings has the
    rest. Does nothing where it is enabled already."""
    global _plugin
    if _plugin is None:
        _plugin = Plugin(device or os.environ.get("TERRACE_TORCH_DEVICE", "cuda"), **settings)
        _plugin.start()
    return _plugin


def disable():
    """Ends it. What is in DDR comes back first."""
    global _plugin
    if _plugin is not None:
        plugin, _plugin = _plugin, None
        plugin.stop()


def figures():
    """What was counted so far, as a dictionary; {} where Terrace is not enabled."""
    return _plugin.figures() if _plugin is not None else {}


def _at_exit():
    if _plugin is not None:
        _plugin.end_process()


atexit.register(_at_exit)
os.register_at_fork(after_in_child=lambda: _plugin is not None and _plugin.after_fork())
if os.environ.get("TERRACE_RUN") and (torch.version.cuda is not None or os.environ.get("TERRACE_TORCH_DEVICE")):
    enable()
