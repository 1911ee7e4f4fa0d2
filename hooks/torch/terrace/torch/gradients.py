"""Gradients in DDR between backward and the update, where backward has no room for them.

A gradient is whole while it is accumulated and whenever a program reads `parameter.grad`. The hook that comes before
an accumulation is all there is in every release of PyTorch: it sends those that were accumulated before.
"""

import sys
import threading
import weakref

import torch

from .library import FOR_GRADIENT
from .parameters import Marked
from .torch_versions import delete_gradient, gradient_of, set_gradient, storage_of
from .travellers import ALL


COMING = 3  # gradients that are made before the first of those sent now has gone


def _references(parameter):
    gradient = gradient_of(parameter)
    return sys.getrefcount(gradient)


def _calibrate():
    parameter = torch.nn.Parameter(torch.ones(1))
    set_gradient(parameter, torch.ones(1))
    return _references(parameter)


class GradientOf:
    """Gives a gradient as long as its parameter has it."""

    __slots__ = ("_gradient", "_parameter")

    def __init__(self, parameter, gradient):
        self._parameter = weakref.ref(parameter)
        self._gradient = gradient

    def __call__(self):
        parameter = self._parameter()
        held = gradient_of(parameter) if parameter is not None else None
        return held if held is self._gradient else None


class Gradients:
    """Of the parameters of modules, where the optimizer's tier is DDR. `ledger_of` as elsewhere."""

    def __init__(self, ledger_of, smallest):
        self._ledger_of = ledger_of
        self._smallest = smallest
        self.always = False  # whatever room there is
        self.make_room = lambda ledger, nbytes, keys: None  # weights may leave
        self.lies_in_a_pool = lambda device, address: False  # of graphs, or of the program's own
        self._captured = Marked()
        self._hooked = {}  # by id: (weak parameter, handle)
        self._accumulated = threading.local()  # (weak, stream), on this thread: may leave
        self._nobody_else = _calibrate()
        self._watching = False

    def watch(self):
        """`parameter.grad` is whole for whoever reads it."""
        if self._watching:
            return
        self._watching = True

        def read(parameter):
            self.whole(parameter)
            return gradient_of(parameter)

        def write(parameter, gradient):
            if gradient is not None and gradient is gradient_of(parameter):
                self.whole(parameter)
            set_gradient(parameter, gradient)

        torch.nn.Parameter.grad = property(read, write, delete_gradient)

    def unwatch(self):
        if self._watching:
            del torch.nn.Parameter.grad
            self._watching = False
        for _, handle in self._hooked.values():
            handle.remove()
        self._hooked.clear()

    def hook(self, ledger, parameters):
        """Those whose gradients are worth moving, once each."""
        for parameter in parameters:
            known = self._hooked.get(id(parameter))
            if known is not None and known[0]() is parameter:
                continue
            if (type(parameter) is not torch.nn.Parameter or not parameter.requires_grad
                    or parameter.device != ledger.device or parameter.layout is not torch.strided
                    or parameter.numel() * parameter.element_size() < self._smallest):
                continue
            ledger.reserve = max(ledger.reserve, COMING * parameter.numel() * parameter.element_size())
            self._hooked[id(parameter)] = (weakref.ref(parameter), self._hook(parameter))
        if len(self._hooked) > 2 * len(parameters) + 64:
            self._hooked = {key: known for key, known in self._hooked.items() if known[0]() is not None}

    def _hook(self, parameter):
        weak = weakref.ref(parameter)

        @torch.utils.hooks.unserializable_hook
        def before_accumulation(_):
            parameter = weak()
            if parameter is not None:
                self._before(parameter)

        return parameter.register_hook(before_accumulation)

    def whole(self, parameter):
        """Its gradient is whole, in order of the current stream, and stays."""
        gradient = gradient_of(parameter)
        if gradient is None:
            return
        ledger = self._ledger_of(gradient.device)
        if ledger is None:
            return
        key = id(gradient)
        with ledger.lock:
            if ledger.states.moves(key):
                if key in ledger.states.absent:
                    self.make_room(ledger, ledger.states.absent[key].nbytes, frozenset())
                ledger.states.bring({key}, keep=False)
            else:
                ledger.states.meet((key,))
            ledger.states.written(key)

    def drop_absent(self, parameters):
        """Nobody will read these gradients any more: those that are away are not brought back to be let go."""
        for parameter in parameters:
            gradient = gradient_of(parameter)
            ledger = self._ledger_of(gradient.device) if gradient is not None else None
            if ledger is not None and id(gradient) in ledger.states.absent:
                set_gradient(parameter, None)

    def _before(self, parameter):
        ledger = self._ledger_of(parameter.device)
        if ledger is not None and ledger.is_capturing():
            self._captured.add(parameter)  # a graph writes its gradient where it is
            return
        self.whole(parameter)
        waiting = getattr(self._accumulated, "list", None)
        if waiting is None:
            waiting = self._accumulated.list = []
        if ledger is not None and waiting:
            with ledger.lock:
                coming = max(ledger.reserve, COMING * parameter.numel() * parameter.element_size())
                made = [(p, stream) for p, stream in ((weak(), stream) for weak, stream in waiting)
                        if p is not None and p is not parameter]
                self._send(ledger, made, coming)
        waiting[:] = [(weakref.ref(parameter), ledger.stream() if ledger is not None else None)]

    def _send(self, ledger, made, coming):
        """Gradients of (parameter, stream on which it was accumulated)."""
        if not self.always and not ledger.is_short(coming):
            return
        if ledger.states.holding or (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return  # who reduces gradients holds them
        for parameter, stream in made:
            gradient = gradient_of(parameter)
            if gradient is None or parameter.device != ledger.device or _references(parameter) > self._nobody_else + 1:
                continue
            if parameter in self._captured:
                continue
            if self._may_move(gradient) and not ledger.states.moves(id(gradient)):
                ledger.states.send(gradient, GradientOf(parameter, gradient), FOR_GRADIENT, keeps=True, stream=stream)
        ledger.states.release(ALL, spare=1)

    def _may_move(self, gradient):
        nbytes = gradient.numel() * gradient.element_size()
        return (type(gradient) is torch.Tensor and gradient.layout is torch.strided and not gradient.requires_grad
                and nbytes >= self._smallest and storage_of(gradient).nbytes() == nbytes
                and not self.lies_in_a_pool(gradient.device, storage_of(gradient).data_ptr()))
