"""Module parameters: found as modules get them.

What is saved of them never moves with the activations. Their storages may be exchanged (`model.cuda()`), mostly before
the first steps.
"""

import functools
import weakref

import torch
from torch.nn.parameter import is_lazy

from .torch_versions import storage_of


class Marked:
    """Parameters by identity, as long as they live. A mark on the tensor itself would be pickled with it."""

    def __init__(self):
        self._weak = {}
        self._look_through_at = 64

    def add(self, parameter):
        self._weak[id(parameter)] = weakref.ref(parameter)
        if len(self._weak) >= self._look_through_at:
            self._weak = {key: weak for key, weak in list(self._weak.items()) if weak() is not None}
            self._look_through_at = 2 * len(self._weak) + 64

    def __contains__(self, parameter):
        weak = self._weak.get(id(parameter))
        return weak is not None and weak() is parameter

    def __iter__(self):
        """One by one, and none is held but the one given."""
        for weak in list(self._weak.values()):
            parameter = weak()
            if parameter is not None:
                yield parameter

    def __len__(self):
        return len(self._weak)


class Parameters:
    LOOK_ROUNDS = 3
    all = Marked()  # of the process
    _registered = 0
    held_elsewhere = Marked()  # their module holds them in a list of its own, too
    on_register = None  # called with the parameter
    _originals = {}

    def __init__(self):
        self._looked = {}  # by ledger: how many were registered at the last look

    @classmethod
    def watch(cls):
        """Every module's parameters from here on: registered, or put there by copying, unpickling and conversions."""
        if cls._originals:
            return
        module = torch.nn.Module
        cls._originals = {name: getattr(module, name) for name in ("register_parameter", "__setstate__", "_apply")}

        def register_parameter(owner, name, param):
            cls._originals["register_parameter"](owner, name, param)
            cls._take(owner, param)

        module.register_parameter = register_parameter
        for name in ("__setstate__", "_apply"):
            setattr(module, name, cls._then_take(cls._originals[name]))

    @classmethod
    def _then_take(cls, original):
        @functools.wraps(original)
        def wrapper(owner, *args, **kwargs):
            result = original(owner, *args, **kwargs)
            cls._registered += 1  # those that were known may have other storages
            for name in list(owner._parameters.keys()):  # of a scripted module they can be asked for by name alone
                cls._take(owner, owner._parameters[name])
            return result

        return wrapper

    @classmethod
    def _take(cls, owner, parameter):
        if parameter is None or parameter in cls.all:
            return
        cls.all.add(parameter)
        cls._registered += 1
        if isinstance(owner, torch.nn.RNNBase):
            cls.held_elsewhere.add(parameter)
        if cls.on_register is not None and not is_lazy(parameter):
            cls.on_register(parameter)

    @classmethod
    def unwatch(cls):
        for name, original in cls._originals.items():
            setattr(torch.nn.Module, name, original)
        cls._originals = {}
        cls.on_register = None

    @classmethod
    def alive(cls):
        """Those that have memory: lazy modules have parameters that refuse to be asked."""
        return [parameter for parameter in cls.all if not is_lazy(parameter)]

    def note(self, ledger):
        beginning = ledger.between_rounds and ledger.rounds < self.LOOK_ROUNDS
        if not beginning and self._looked.get(id(ledger)) == self._registered:
            return
        self._looked[id(ledger)] = self._registered
        for parameter in Parameters.alive():
            if parameter.device != ledger.device or parameter.layout is not torch.strided:
                continue
            try:
                ledger.keep(storage_of(torch.Tensor.detach(parameter)))
            except RuntimeError:
                continue  # a subclass without a storage of its own
