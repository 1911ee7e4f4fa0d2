"""Optimizer state in DDR between updates.

Around every step() of every optimizer: its large state tensors come back before, with gradients and weights that are
away, and leave behind the update, while the next forward runs. A tensor that is away is empty; state_dict(), pickling
and copying bring all of it back.
"""

import functools
import weakref

import torch

from .library import FOR_GRADIENT, FOR_OPTIMIZER
from .optimizer_slices import READS_GRADIENTS, Sliced, bytes_of, cut, may_slice
from .torch_versions import gradient_of, storage_of
from .travellers import ALL


class OptimizerStates:
    """Wraps the optimizers. `ledger_of` gives a device's ledger or None; `ledgers` are those that are open, by device."""

    _PARTS = ("state_dict", "load_state_dict", "__getstate__")

    def __init__(self, ledger_of, ledgers, device_type, smallest):
        self._ledger_of = ledger_of
        self._ledgers = ledgers
        self._device_type = device_type
        self._smallest = smallest
        self.before_step = lambda: None
        self.on_step = lambda: None
        self.tier_is_ddr = False
        self.make_room = lambda nbytes, keys: None  # so many bytes more, beside the tensors with these keys
        self.update_room = lambda: None  # bytes of HBM for state while an update runs; None: as many as it takes
        self.seen = weakref.WeakSet()  # optimizers
        self._captured = weakref.WeakSet()
        self._originals = {}
        self._wrapped = []  # (class, its own step)

    def watch(self):
        base = torch.optim.Optimizer
        self._originals = {name: getattr(base, name) for name in ("__init__", "__setstate__", *self._PARTS)}
        for name in ("__init__", "__setstate__"):
            setattr(base, name, self._then_wrap_step(self._originals[name]))
        for name in self._PARTS:
            setattr(base, name, self._whole_before(self._originals[name]))

    def unwatch(self):
        for name, original in self._originals.items():
            setattr(torch.optim.Optimizer, name, original)
        for owner, original in self._wrapped:
            owner.step = original
        self._originals, self._wrapped = {}, []

    def _then_wrap_step(self, original):
        @functools.wraps(original)
        def wrapper(optimizer, *args, **kwargs):
            original(optimizer, *args, **kwargs)
            self._wrap_step(type(optimizer))
            self.seen.add(optimizer)

        return wrapper

    def _whole_before(self, original):
        @functools.wraps(original)
        def wrapper(optimizer, *args, **kwargs):
            self.bring_all()
            return original(optimizer, *args, **kwargs)

        return wrapper

    def _wrap_step(self, owner):
        if getattr(owner.step, "_terrace", False):
            return
        original = owner.step

        @functools.wraps(original)  # with PyTorch's own marks
        def step(optimizer, *args, **kwargs):
            if any(ledger.is_capturing() for ledger in self._open()):
                self._captured.add(optimizer)  # all was whole when the capture began, and stays where it is
                return original(optimizer, *args, **kwargs)
            self.before_step()
            try:
                runs = self._runs(optimizer, args, kwargs)
                if runs:
                    return self._step_in_runs(optimizer, original, runs)
                return self._step_whole(optimizer, original, args, kwargs)
            finally:
                self._send(optimizer, None)
                self.on_step()

        step._terrace = True
        owner.step = step
        self._wrapped.append((owner, original))

    def _open(self):
        return [ledger for ledger in list(self._ledgers.values()) if not ledger.closed]

    def bring_all(self):
        """Every state is whole. Weights that are away come as modules ask for them."""
        for ledger in self._open():
            with ledger.lock:
                ledger.states.bring_all((FOR_OPTIMIZER, FOR_GRADIENT))

    def _step_whole(self, optimizer, original, args, kwargs):
        """All at once; a closure in it runs whole passes, in which nothing of the update leaves."""
        wanted = self._tensors(optimizer, [p for group in optimizer.param_groups for p in group["params"]])
        for ledger in self._open():
            with ledger.lock:
                ledger.states.bring_all((FOR_OPTIMIZER, FOR_GRADIENT))
                ledger.states.bring(wanted, keep=False)
                self._written(ledger, wanted)
                ledger.states.holding += 1
        held = self._open()
        try:
            return original(optimizer, *args, **kwargs)
        finally:
            for ledger in held:
                ledger.states.holding -= 1

    def _runs(self, optimizer, args, kwargs):
        """Parameters in runs: two runs at a time have room, one at work and one on its way."""
        if not self.tier_is_ddr or optimizer in self._captured or not may_slice(optimizer, args, kwargs):
            return []
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        absent = self._absent()
        sizes = [bytes_of(optimizer, p, absent) for p in parameters]
        room = self.update_room()
        if room is None or sum(sizes) <= room:
            return []
        return [[parameters[i] for i in run] for run in cut(sizes, room // 2)]

    def _absent(self):
        """What is away, on all devices, by key."""
        absent = {}
        for ledger in self._open():
            absent.update(ledger.states.absent)
        return absent

    @staticmethod
    def _tensors(optimizer, parameters):
        """The keys of all that an update of these reads or writes."""
        keys = {id(v) for p in parameters for v in optimizer.state.get(p, {}).values() if isinstance(v, torch.Tensor)}
        keys.update(id(gradient_of(p)) for p in parameters)
        keys.update(id(p) for p in parameters)
        return keys

    @staticmethod
    def _written(ledger, keys):
        """An update writes these, and not every kernel of PyTorch's tells the version."""
        for key in keys:
            ledger.states.written(key)

    def _step_in_runs(self, optimizer, original, runs):
        reads_gradients = type(optimizer) in READS_GRADIENTS and getattr(optimizer, "grad_scale", None) is None
        for turn, run in enumerate(runs):
            wanted = self._tensors(optimizer, run)
            away = [one for key, one in self._absent().items() if key in wanted and one.purpose != FOR_OPTIMIZER]
            absent = self._absent()
            self.make_room(sum(bytes_of(optimizer, p, absent) for p in run), wanted)
            written = {id(p) for p in run} if reads_gradients else wanted
            for ledger in self._open():
                with ledger.lock:
                    ledger.states.bring(wanted, keep=True)
                    self._written(ledger, written)
            with Sliced(optimizer, run):
                original(optimizer)
            self._send(optimizer, run)
            for ledger in self._open():
                with ledger.lock:
                    # In order of the stream: the update of this run, its way out, the next run's way in.
                    for one in away:
                        tensor = one.tensor()
                        if tensor is not None and tensor.device == ledger.device:
                            ledger.states.send(tensor, one.tensor, one.purpose, keeps=True)
                    if turn + 1 < len(runs):
                        ledger.states.start(self._tensors(optimizer, runs[turn + 1]))
                    ledger.states.release(ALL)

    def _send(self, optimizer, parameters):
        """State of these parameters begins to leave; of all whose state is here, where none are named."""
        if not self.tier_is_ddr or optimizer in self._captured:
            return
        chosen = None if parameters is None else {id(p) for p in parameters}
        travelling = {one.key for ledger in self._open() for one in ledger.states.leaving + ledger.states.back}
        for parameter, values in optimizer.state.items():
            if not isinstance(values, dict) or (chosen is not None and id(parameter) not in chosen):
                continue
            for value in values.values():
                if self._may_move(value, parameter) and id(value) not in travelling:
                    self._send_one(value)

    def _may_move(self, value, parameter):
        return (type(value) is torch.Tensor and value is not parameter and value.device.type == self._device_type
                and value.layout is torch.strided and not value.requires_grad
                and value.numel() * value.element_size() >= self._smallest
                and storage_of(value).nbytes() == value.numel() * value.element_size())

    def _send_one(self, tensor):
        ledger = self._ledger_of(tensor.device)
        if ledger is None:
            return
        with ledger.lock:
            ledger.states.send(tensor, weakref.ref(tensor))
