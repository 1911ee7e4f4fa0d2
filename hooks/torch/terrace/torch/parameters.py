"""Module parameters: found as modules register them.

What is saved of them never moves with the activations. Their storages may be exchanged (`model.cuda()`), mostly before
the first steps.
"""

import weakref

import torch

from .torch_versions import storage_of


class Marked:
    """Parameters by identity, as long as they live. A mark on the tensor itself would be pickled with it."""

    def __init__(self):
        self._weak = {}

    def add(self, parameter):
        self._weak[id(parameter)] = weakref.ref(parameter)

    def __contains__(self, parameter):
        weak = self._weak.get(id(parameter))
        return weak is not None and weak() is parameter


class Parameters:
    LOOK_ROUNDS = 3
    all = []  # weak, of the process
    _registered = 0
    held_elsewhere = Marked()  # their module holds them in a list of its own, too
    on_register = None  # called with the parameter

    def __init__(self):
        self._looked = {}  # by ledger: how many were registered at the last look

    @classmethod
    def watch(cls):
        """Every module's register_parameter from here on."""
        original = torch.nn.Module.register_parameter
        if getattr(original, "_terrace", None) is not None:
            return

        def register_parameter(module, name, param):
            original(module, name, param)
            if param is not None:
                cls.all.append(weakref.ref(param))
                cls._registered += 1
                if isinstance(module, torch.nn.RNNBase):
                    cls.held_elsewhere.add(param)
                if cls.on_register is not None:
                    cls.on_register(param)

        register_parameter._terrace = original
        torch.nn.Module.register_parameter = register_parameter

    @classmethod
    def unwatch(cls):
        original = getattr(torch.nn.Module.register_parameter, "_terrace", None)
        if original is not None:
            torch.nn.Module.register_parameter = original
        cls.on_register = None

    @classmethod
    def alive(cls):
        """Those that are, each once."""
        found = {id(parameter): parameter for parameter in (weak() for weak in cls.all) if parameter is not None}
        return list(found.values())

    def note(self, ledger):
        beginning = ledger.between_rounds and ledger.rounds < self.LOOK_ROUNDS
        if not beginning and self._looked.get(id(ledger)) == self._registered:
            return
        self._looked[id(ledger)] = self._registered
        alive = []
        for reference in Parameters.all:
            parameter = reference()
            if parameter is None:
                continue
            alive.append(reference)
            if parameter.device != ledger.device or parameter.layout is not torch.strided:
                continue
            try:
                ledger.keep(storage_of(torch.Tensor.detach(parameter)))
            except RuntimeError:
                continue  # a subclass without a storage of its own
        Parameters.all[:] = alive
