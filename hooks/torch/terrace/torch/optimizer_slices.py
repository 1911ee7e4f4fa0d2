"""Updates in slices, where optimizer state as a whole would not fit: some parameters at a time.

Only for optimizers that update each element from itself alone, so that slices give the same bits, and only where
nobody would notice that step() ran several times.
"""

import sys

import torch

from .torch_versions import gradient_of

# By exact type: a subclass may look at all parameters at once.
ELEMENTWISE = {torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop, torch.optim.Adagrad,
               torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam}
READS_GRADIENTS = {torch.optim.Adam, torch.optim.AdamW}  # and does not write them, in whatever form
_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_GLOBAL_HOOKS = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")


def may_slice(optimizer, args, kwargs):
    if type(optimizer) not in ELEMENTWISE or args or kwargs:  # a closure computes gradients: once
        return False
    everywhere = sys.modules.get("torch.optim.optimizer")
    return not (any(getattr(optimizer, name, None) for name in _HOOKS)
                or any(getattr(everywhere, name, None) for name in _GLOBAL_HOOKS))


def bytes_of(optimizer, parameter, absent):
    """That have to come for the parameter's update: of its state, itself and its gradient, as far as they are `absent`, by key;
    before its first update of what Adam would make."""
    values, gradient = optimizer.state.get(parameter), gradient_of(parameter)
    keys = [id(parameter), id(gradient)] + [id(v) for v in tensors_of(values)]
    away = sum(absent[key].nbytes for key in keys if key in absent)
    if not values:
        return away + (2 * parameter.numel() * parameter.element_size() if gradient is not None else 0)
    return away


def tensors_of(values):
    return [v for v in values.values() if isinstance(v, torch.Tensor)] if isinstance(values, dict) else []


def whole_bytes(tensor):
    """As large as it is when it is not away."""
    return getattr(tensor, "_terrace_bytes", None) or tensor.numel() * tensor.element_size()


def cut(sizes_in_order, room):
    """Consecutive runs whose sizes stay within `room`, each of at least one."""
    runs, current, held = [], [], 0
    for index, size in enumerate(sizes_in_order):
        if current and held + size > room:
            runs.append(current)
            current, held = [], 0
        current.append(index)
        held += size
    if current:
        runs.append(current)
    return runs


class Sliced:
    """The optimizer with some of its parameters, for the time of a `with`."""

    def __init__(self, optimizer, chosen):
        self._optimizer = optimizer
        self._chosen = {id(parameter) for parameter in chosen}

    def __enter__(self):
        self._whole = [group["params"] for group in self._optimizer.param_groups]
        for group in self._optimizer.param_groups:
            group["params"] = [p for p in group["params"] if id(p) in self._chosen]

    def __exit__(self, *error):
        for group, params in zip(self._optimizer.param_groups, self._whole):
            group["params"] = params
