"""Optimizer state in DDR between updates.

Around every step() of every optimizer: its large state tensors come back before, and leave behind the update, while
the next forward runs. A tensor that is away is empty; state_dict(), pickling and copying bring all of it back.
"""

import functools
import weakref

import torch

from .library import FOR_OPTIMIZER, TerraceError
from .optimizer_slices import Sliced, bytes_of, cut, may_slice
from .torch_versions import new_storage, storage_of, view_of


class State:
    """A state tensor, as long as its optimizer has it. Its storage is its own, whole."""

    __slots__ = ("copy", "geometry", "nbytes", "storage", "stream", "tensor")

    def __init__(self, tensor, stream):
        self.tensor = weakref.ref(tensor)
        self.geometry = (tensor.size(), tensor.stride(), tensor.storage_offset())
        self.storage = storage_of(tensor)  # while copies read or write it
        self.nbytes = self.storage.nbytes()
        self.stream = stream
        self.copy = 0


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
            state.copy = ledger.stash.spill(state.stream, state.storage.data_ptr(), state.nbytes, FOR_OPTIMIZER)
        except TerraceError as error:
            ledger.failures["ddr_full" if error.ddr_is_full else "spill_failed"] += 1
            return
        self.moved += state.nbytes
        self.held += state.nbytes
        self.leaving.append(state)

    def release(self, everything):
        """HBM of what has left goes back; of everything, where room is wanted, in order of its stream."""
        stash = self._ledger.stash
        leaving, self.leaving = self.leaving, []
        for state in leaving:
            try:
                if everything:
                    stash.depart(state.stream, state.copy)
                elif not stash.has_left(state.copy):
                    self.leaving.append(state)
                    continue
            except TerraceError:
                self._ledger.failures["spill_failed"] += 1
                self._end(state)  # it stays
                continue
            tensor = state.tensor()
            if tensor is None:
                self._end(state)
                continue
            tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            tensor._terrace_bytes = state.nbytes
            state.storage = None
            self.held -= state.nbytes
            self.away.append(state)

    def _end(self, state):
        """The stash forgets it; whoever uses its storage comes behind the copies."""
        self._ledger.stash.drop(state.stream, state.copy)
        if state.storage is not None:
            self.held -= state.nbytes
            state.storage = None

    def purge(self):
        """States whose optimizers have gone."""
        for name in ("leaving", "away", "back"):
            states = getattr(self, name)
            for state in states:
                if state.tensor() is None:
                    self._end(state)
            setattr(self, name, [state for state in states if state.tensor() is not None])

    def prefetch(self, room):
        """Those that the next update reads first, as far as there is room."""
        while self.away and self.away[0].nbytes <= room:
            room -= self.away[0].nbytes
            self._start(0)

    def start(self, wanted):
        """Those of these tensors that are away begin to come back."""
        for index in [i for i, state in enumerate(self.away) if id(state.tensor()) in wanted][::-1]:
            self._start(index)

    def _start(self, index):
        ledger, state = self._ledger, self.away[index]
        tensor = state.tensor()
        if tensor is not None:
            storage = new_storage(state.nbytes, ledger.device)
            state.stream = ledger.stream()
            ledger.stash.restore(state.stream, state.copy, storage.data_ptr())
            state.storage = storage
            self.moved += state.nbytes
            self.held += state.nbytes
            self.back.append(state)
        else:
            self._end(state)
        del self.away[index]

    def bring_all(self):
        """Every state is whole, in order of the current stream."""
        while self.away:
            self._start(0)
        self.wait({id(state.tensor()) for state in self.back + self.leaving})

    def wait(self, wanted):
        """Those of these tensors that are not away are whole, in order of the current stream, and stay."""
        ledger = self._ledger
        stream = ledger.stream()
        for state in [state for state in self.back if id(state.tensor()) in wanted]:
            ledger.stash.wait_for(stream, state.copy)
            tensor = state.tensor()
            if tensor is not None:
                tensor.data = view_of(state.storage, tensor, state.geometry)
                ledger.tie(tensor, state.stream, stream)
            state.stream = stream
            self._end(state)
            self.back.remove(state)
        for state in [state for state in self.leaving if id(state.tensor()) in wanted]:
            # Its bytes are here: whoever writes them comes behind the copy.
            state.stream = stream
            self._end(state)
            self.leaving.remove(state)


class OptimizerStates:
    """Wraps the optimizers. `ledger_of` gives a device's ledger or None; each gets DeviceStates."""

    _PARTS = ("state_dict", "load_state_dict", "__getstate__")

    def __init__(self, ledger_of, device_type, smallest):
        self._ledger_of = ledger_of
        self._device_type = device_type
        self._smallest = smallest
        self.before_step = lambda: None
        self.on_step = lambda: None
        self.tier_is_ddr = False
        self.update_room = lambda: None  # bytes of HBM for state while an update runs; None: as many as it takes
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
            self.before_step()
            try:
                runs = self._runs(optimizer, args, kwargs)
                if len(runs) > 1:
                    return self._step_in_runs(optimizer, original, runs)
                self.bring_all()
                return original(optimizer, *args, **kwargs)
            finally:
                self._send(optimizer, None)
                self.on_step()

        step._terrace = True
        owner.step = step
        self._wrapped.append((owner, original))

    def bring_all(self):
        for ledger in self._ledgers.values():
            with ledger.lock:
                if not ledger.closed:
                    ledger.states.bring_all()

    def _runs(self, optimizer, args, kwargs):
        """Parameters in runs: two runs at a time have room, one at work and one on its way."""
        if not self.tier_is_ddr or not may_slice(optimizer, args, kwargs):
            return []
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        sizes = [bytes_of(optimizer, p) for p in parameters]
        room = self.update_room()
        if room is None or sum(sizes) <= room:
            return []
        return [[parameters[i] for i in run] for run in cut(sizes, room // 2)]

    @staticmethod
    def _tensors(optimizer, parameters):
        return {id(v) for p in parameters for v in optimizer.state.get(p, {}).values() if isinstance(v, torch.Tensor)}

    def _step_in_runs(self, optimizer, original, runs):
        for turn, run in enumerate(runs):
            for ledger in self._ledgers.values():
                with ledger.lock:
                    ledger.states.start(self._tensors(optimizer, run))
                    ledger.states.wait(self._tensors(optimizer, run))
            with Sliced(optimizer, run):
                original(optimizer)
            self._send(optimizer, run)
            for ledger in self._ledgers.values():
                with ledger.lock:
                    # In order of the stream: the update of this run, its way out, the next run's way in.
                    if turn + 1 < len(runs):
                        ledger.states.start(self._tensors(optimizer, runs[turn + 1]))
                    ledger.states.release(True)

    def _send(self, optimizer, parameters):
        """State of these parameters begins to leave; of all whose state is here, where none are named."""
        if not self.tier_is_ddr:
            return
        chosen = None if parameters is None else {id(p) for p in parameters}
        travelling = {id(s.tensor()) for ledger in self._ledgers.values() for s in ledger.states.leaving + ledger.states.back}
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
            if ledger.device not in self._ledgers:
                ledger.states = DeviceStates(ledger)
                self._ledgers[ledger.device] = ledger
            ledger.states.send(tensor)
