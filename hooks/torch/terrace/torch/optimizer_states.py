"""Optimizer state in DDR between updates.

Around every step() of every optimizer: its large state tensors come back before, and leave behind the update, while
the next forward runs. A tensor that is away is empty; state_dict(), pickling and copying bring all of it back.
"""

import functools

import torch

from .library import FOR_OPTIMIZER, TerraceError
from .torch_versions import new_storage, storage_of, view_of


class State:
    """A state tensor. Its storage is its own, whole."""

    __slots__ = ("arriving", "copy", "geometry", "nbytes", "stream", "tensor")

    def __init__(self, tensor, stream):
        self.tensor = tensor
        self.geometry = (tensor.size(), tensor.stride(), tensor.storage_offset())
        self.nbytes = storage_of(tensor).nbytes()
        self.stream = stream
        self.copy = 0
        self.arriving = False


class DeviceStates:
    """The states of one device, in three places: leaving, away, coming back."""

    def __init__(self, ledger):
        self._ledger = ledger
        self.held = 0  # bytes in HBM that are on their way out, or back early
        self.moved = 0
        self.leaving = []
        self.away = []
        self.back = []

    def send(self, tensor):
        ledger = self._ledger
        state = State(tensor, ledger.stream())
        try:
            address = storage_of(tensor).data_ptr()
            state.copy = ledger.stash.spill(state.stream, address, state.nbytes, FOR_OPTIMIZER)
        except TerraceError as error:
            ledger.failures["ddr_full" if error.ddr_is_full else "spill_failed"] += 1
            return
        self.moved += state.nbytes
        self.held += state.nbytes
        self.leaving.append(state)

    def release(self, everything):
        """HBM of what has left goes back; of everything, where room is wanted, in order of its stream."""
        stash = self._ledger.stash
        kept = []
        for state in self.leaving:
            try:
                if everything:
                    stash.depart(state.stream, state.copy)
                elif not stash.has_left(state.copy):
                    kept.append(state)
                    continue
            except TerraceError:
                self._ledger.failures["spill_failed"] += 1
                self._stay(state)
                continue
            state.tensor.data = torch.empty(0, dtype=state.tensor.dtype, device=state.tensor.device)
            self.held -= state.nbytes
            self.away.append(state)
        self.leaving = kept

    def _stay(self, state):
        self._ledger.stash.drop(state.stream, state.copy)
        self.held -= state.nbytes

    def prefetch(self, room):
        """Those that the next update reads first, as far as there is room."""
        while self.away and self.away[0].nbytes <= room:
            room -= self.away[0].nbytes
            self._start(self.away.pop(0))

    def _start(self, state):
        ledger = self._ledger
        storage = new_storage(state.nbytes, ledger.device)
        state.stream = ledger.stream()
        ledger.stash.restore(state.stream, state.copy, storage.data_ptr())
        state.tensor.data = view_of(storage, state.tensor, state.geometry)
        state.arriving = True
        self.moved += state.nbytes
        self.held += state.nbytes
        self.back.append(state)

    def bring_all(self):
        """Every state is whole, in order of the current stream."""
        ledger = self._ledger
        while self.away:
            self._start(self.away[0])
            self.away.pop(0)
        stream = ledger.stream()
        for state in self.back:
            ledger.stash.wait_for(stream, state.copy)
            ledger.tie(state.tensor, state.stream, stream)
            ledger.stash.drop(stream, state.copy)
            self.held -= state.nbytes
        self.back = []
        for state in self.leaving:
            # Its bytes are here: whoever writes them comes behind the copy.
            ledger.stash.drop(stream, state.copy)
            self.held -= state.nbytes
        self.leaving = []


class OptimizerStates:
    """Wraps the optimizers. `ledger_of` gives a device's ledger or None; each gets DeviceStates."""

    _PARTS = ("state_dict", "load_state_dict", "__getstate__")

    def __init__(self, ledger_of, device_type, smallest):
        self._ledger_of = ledger_of
        self._device_type = device_type
        self._smallest = smallest
        self.on_step = lambda: None
        self.tier_is_ddr = False
        self._ledgers = {}
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
            self.bring_all()
            try:
                return original(optimizer, *args, **kwargs)
            finally:
                self._send(optimizer)
                self.on_step()

        step._terrace = True
        owner.step = step
        self._wrapped.append((owner, original))

    def bring_all(self):
        for ledger in self._ledgers.values():
            with ledger.lock:
                if not ledger.closed:
                    ledger.states.bring_all()

    def _send(self, optimizer):
        if not self.tier_is_ddr:
            return
        for parameter, values in optimizer.state.items():
            if not isinstance(values, dict):
                continue
            for value in values.values():
                if self._may_move(value, parameter):
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
            if ledger.device not in self._ledgers:
                ledger.states = DeviceStates(ledger)
                self._ledgers[ledger.device] = ledger
            ledger.states.send(tensor)
