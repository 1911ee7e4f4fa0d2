"""Optimizer state in DDR between updates.

Around every step() of every optimizer: its large state tensors come back before, with gradients and weights that are
away, and leave behind the update, while the next forward runs; as many as the last round of forward and backward had no
room for, where one is known. A tensor that is away is empty; state_dict(), pickling and copying bring all of it back.
"""

import functools
import sys
import weakref

import torch

from .library import FOR_GRADIENT, FOR_OPTIMIZER, FOR_WEIGHTS
from .optimizer_slices import READS_GRADIENTS, Sliced, bytes_of, cut, may_slice, tensors_of, whole_bytes
from .torch_versions import gradient_of, storage_of
from .travellers import ALL

RUNS = 8  # of an update that has room: what is done begins to leave while the rest is at work
SMALLEST_RUN = 64 << 20  # bytes of state


def _holders(state, parameter):
    return sys.getrefcount(state[parameter])


_OPTIMIZER_ALONE = _holders({0: {}}, 0)


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
        self._to_leave = ALL  # bytes of state, behind this update
        self._left = 0  # of these
        self._others_moved = 0  # bytes of gradients and weights that have left and come back: state is to leave before them
        self._stayed = 0  # bytes of state that could have left behind the last update
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
            if not self._originals:  # somebody kept it across unwatch()
                return owner.step(optimizer, *args, **kwargs)
            if any(ledger.is_capturing() for ledger in self._open()):
                self._captured.add(optimizer)  # all was whole when the capture began, and stays where it is
                return original(optimizer, *args, **kwargs)
            self.before_step()
            movable = self._plan(optimizer)
            try:
                runs, wanted = self._runs(optimizer, args, kwargs)
                if runs:
                    return self._step_in_runs(optimizer, original, runs, wanted)
                return self._step_whole(optimizer, original, args, kwargs)
            finally:
                self._send(optimizer, None)
                self._stayed = max(0, movable - self._left)
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

    def _plan(self, optimizer):
        """How much is to leave behind this update: what the last round had no room for. Gives the bytes that may leave,
        0 where all of them do."""
        self._left, self._to_leave = 0, ALL
        ledgers = self._open()
        if not self.tier_is_ddr or len(ledgers) != 1 or len(self.seen) != 1 or ledgers[0].lease.asked:
            return 0
        states = ledgers[0].states
        self._others_moved = (states.moved[FOR_GRADIENT] + states.moved[FOR_WEIGHTS]) // 2
        spare = ledgers[0].spare_in_round()
        movable = sum(self._movable_bytes(optimizer, p) for p in optimizer.state)
        if spare is None or movable == 0:
            return 0
        self._to_leave = movable - max(0, self._stayed + spare - self._others_moved)
        return movable

    def _movable_bytes(self, optimizer, parameter):
        return sum(whole_bytes(v) for v in tensors_of(optimizer.state.get(parameter))
                   if hasattr(v, "_terrace_bytes") or self._may_move(v, parameter))

    def _runs(self, optimizer, args, kwargs):
        """Parameters in runs, and how many bytes of those that leave are waited for after each. Where room is short, two runs at
        a time have some, one at work and one on its way."""
        if not self.tier_is_ddr or optimizer in self._captured or not may_slice(optimizer, args, kwargs):
            return [], 0
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        absent = self._absent()
        sizes = [bytes_of(optimizer, p, absent) for p in parameters]
        room = self.update_room()
        if room is None:
            return [], 0
        part, wanted = room // 2, ALL
        if sum(sizes) <= room:
            sizes = [self._movable_bytes(optimizer, p) for p in parameters]
            part, wanted = max(SMALLEST_RUN, sum(sizes) // RUNS), 0
            if self._to_leave <= 0 or sum(sizes) <= part:
                return [], 0
        return [[parameters[i] for i in run] for run in cut(sizes, part)], wanted

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

    def _step_in_runs(self, optimizer, original, runs, wanted):
        reads_gradients = type(optimizer) in READS_GRADIENTS and getattr(optimizer, "grad_scale", None) is None
        for turn, run in enumerate(runs):
            keys = self._tensors(optimizer, run)
            absent = self._absent()
            away = [one for key, one in absent.items() if key in keys and one.purpose != FOR_OPTIMIZER]
            self.make_room(sum(bytes_of(optimizer, p, absent) for p in run), keys)
            written = {id(p) for p in run} if reads_gradients else keys
            for ledger in self._open():
                with ledger.lock:
                    ledger.states.bring(keys, keep=True)
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
                    ledger.states.release(wanted)

    def _send(self, optimizer, parameters):
        """State of these parameters begins to leave; of all whose state is here, where none are named."""
        if not self.tier_is_ddr or optimizer in self._captured:
            return
        chosen = None if parameters is None else {id(p) for p in parameters}
        travelling = {one.key for ledger in self._open() for one in ledger.states.leaving + ledger.states.back}
        for parameter in list(optimizer.state):
            if chosen is not None and id(parameter) not in chosen:
                continue
            if _holders(optimizer.state, parameter) > _OPTIMIZER_ALONE:
                continue  # a state_dict() that somebody keeps has the very same: it shows the state whenever it is read
            values = optimizer.state[parameter]
            if not isinstance(values, dict):
                continue
            for value in values.values():
                if self._left < self._to_leave and self._may_move(value, parameter) and id(value) not in travelling:
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
            if ledger.states.send(tensor, weakref.ref(tensor)):
                self._left += tensor.numel() * tensor.element_size()
