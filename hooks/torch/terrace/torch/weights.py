"""Weights in DDR between their uses, where not all of them have room beside what a step needs.

A module brings a weight by being asked for it, backward by unpacking it, the update by its turn. Those used last stay;
what was used next the last time comes back ahead. A weight that was not written since it came leaves without a copy.
"""

import collections
import sys
import weakref

import torch

from .library import FOR_WEIGHTS
from .parameters import Parameters
from .torch_versions import data_of, set_data, storage_of, view_of
from .travellers import ALL

AHEAD = 2  # weights on their way at a time
LOOK = 16  # uses ahead
RECENT = 4  # uses behind, whose operators may be at work


def _references(weak):
    return sys.getrefcount(weak())


def _of_a_module_alone():
    module = {"weight": torch.nn.Parameter(torch.empty(0))}
    return _references(weakref.ref(module["weight"]))


class Shown:
    """The memory of a weight, until a program gives it other memory. Lives as long as the weight has it, or backward reads it."""

    __slots__ = ("data",)

    def __init__(self):
        self.data = None  # the weight's own


class Weight:
    """A parameter that may move. Gives it, or None once it is gone."""

    A_MODULES = _of_a_module_alone()

    __slots__ = ("__weakref__", "_weak", "rest", "saved", "shown", "streams")

    def __init__(self, parameter):
        self._weak = weakref.ref(parameter)
        self.rest = self.A_MODULES  # references to it while nobody is at work; a module's, until that is seen
        self.saved = []  # one item for each time that autograd has it: counted without a lock on any thread
        self.streams = set()  # that have used it where it is
        self.shown = Shown()

    def __call__(self):
        return self._weak()

    def references(self):
        return _references(self._weak)

    def part(self, data):
        """What autograd has of it stays as it is in `data`, whatever becomes of the weight."""
        self.shown.data = data
        self.shown = Shown()

    def note_rest(self):
        self.rest = self.references() - len(self.saved)

    def is_busy(self, ours):
        """Somebody holds it who does not hold it between steps, and not `ours` either: a module at work, as a rule."""
        return self.references() - len(self.saved) > self.rest + ours


class SavedWeight:
    """What autograd has of a weight: its geometry. The parameter lives as long."""

    __slots__ = ("_parameter", "geometry", "like", "shown", "version", "weight")

    def __init__(self, weight, tensor):
        self.weight = weight
        self._parameter = weight()
        weight.saved.append(None)
        self.shown = weight.shown
        self.like = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        self.geometry = (tensor.size(), tensor.stride(), tensor.storage_offset())
        self.version = self._parameter._version  # a tensor that backward was given has a counter of its own

    def __del__(self):
        self.weight.saved.pop()

    @property
    def tensor(self):
        return self._parameter


class Weights:
    """Of the modules of this process. Nothing of a program is touched before room has run short between two steps."""

    def __init__(self, ledger_of, device_type, smallest):
        self._ledger_of = ledger_of
        self._device_type = device_type
        self._smallest = smallest
        self.active = False
        self.stay = None  # why none may move any more: "compiled", "captured", "ended"
        self._known = {}  # by id of the parameter
        self._by_storage = {}  # id by storage, of those that are whole
        self._used = collections.OrderedDict()  # ids, the least recently used first
        self._order = []  # ids as they were used since the last step
        self._expected = []  # the same of the step before
        self._turn = 0
        self._originals = {}

    # ------------------------------------------------------------ life

    def at_rest(self, ledger, parameters):
        """Nobody computes: it is between two steps. Begins where room is short. `parameters` are given one by one: whoever
        has a list of them is counted as holding them."""
        with ledger.lock:
            if self._has_begun(ledger):
                self._note(ledger, parameters)
                for weight in self._known.values():
                    if weight() is not None:
                        weight.note_rest()

    def building(self, ledger, parameters, parameter):
        """A module is being given this parameter, perhaps in the middle of another one's forward: who holds the others now
        says nothing of who does at rest."""
        with ledger.lock:
            if self._has_begun(ledger):
                self._note(ledger, parameters)
                self._make_room_for(ledger, 0, id(parameter))

    def _has_begun(self, ledger):
        if self.stay or (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return False
        if not self.active and ledger.is_short():
            self._begin()
        return self.active

    def next_step(self):
        if self._order:
            self._expected, self._order, self._turn = self._order, [], 0

    def _begin(self):
        self.active = True
        module, parameter = torch.nn.Module, torch.nn.Parameter
        self._originals = {"__getattr__": module.__getattr__, "_apply": module._apply}
        get, apply = self._originals["__getattr__"], self._originals["_apply"]

        def __getattr__(owner, name):
            value = get(owner, name)
            if type(value) is parameter:
                self.use(value)
            return value

        def _apply(owner, function, *args, **kwargs):
            def of_whole(tensor):
                # One by one: what a child, or the one before, has brought may have sent this one away.
                if type(tensor) is parameter:
                    self.whole(tensor)
                return function(tensor)

            return apply(owner, of_whole, *args, **kwargs)

        module.__getattr__, module._apply = __getattr__, _apply

        def read(p):
            self.whole(p)
            return data_of(p)

        def write(p, data):
            self.whole(p)
            weight = self._weight(p)
            if weight is not None:
                weight.part(data_of(p))
                weight.streams.clear()
            set_data(p, data)

        def detach(p):
            self.whole(p)
            return torch.Tensor.detach(p)

        def copy_(p, source, *args, **kwargs):
            """load_state_dict() comes to this, for each."""
            if type(source) is parameter:
                self._bring(source, keep=True)
            self.whole(p)
            return torch.Tensor.copy_(p, source, *args, **kwargs)

        parameter.data = property(read, write)
        parameter.detach = detach
        parameter.copy_ = copy_

    def end(self, why=None):
        """All are whole, and none moves any more."""
        self.stay = self.stay or why or "ended"
        if not self.active:
            return
        ledgers = set()
        for weight in list(self._known.values()):
            parameter = weight()
            if parameter is not None:
                ledgers.add(self._bring(parameter, keep=False))
                weight.part(data_of(parameter))
        for ledger in ledgers - {None}:
            ledger.finish()  # from here on nobody is asked on which stream a weight is read
        for name, original in self._originals.items():
            setattr(torch.nn.Module, name, original)
        del torch.nn.Parameter.data, torch.nn.Parameter.detach, torch.nn.Parameter.copy_
        self.active = False
        self._known.clear()
        self._by_storage.clear()
        self._used.clear()

    # ------------------------------------------------------------ which

    def _note(self, ledger, parameters):
        for key in [key for key, weight in self._known.items() if weight() is None]:
            del self._known[key]
            self._used.pop(key, None)
        owners = collections.Counter()
        new = []
        for parameter in parameters:
            if not self._may_move(ledger, parameter):
                continue
            key = id(parameter)
            if key in ledger.states.absent:
                continue
            owners[storage_of(parameter)._cdata] += 1
            new.append((key, parameter))
        self._by_storage = {}
        for key, parameter in new:
            address = storage_of(parameter)._cdata
            if owners[address] > 1:
                continue  # another parameter shows the same bytes
            self._by_storage[address] = key
            if key not in self._known:
                self._known[key] = Weight(parameter)
                self._used[key] = None

    def _may_move(self, ledger, parameter):
        if type(parameter) is not torch.nn.Parameter:
            return False
        nbytes = parameter.numel() * parameter.element_size()
        if (parameter.device != ledger.device or parameter.layout is not torch.strided or nbytes < self._smallest
                or parameter.is_quantized or parameter.is_inference() or parameter in Parameters.held_elsewhere):
            return False
        return id(parameter) in ledger.states.absent or storage_of(parameter).nbytes() == nbytes

    # ------------------------------------------------------------ uses

    def _weight(self, parameter):
        weight = self._known.get(id(parameter))
        return weight if weight is not None and weight() is parameter else None

    def whole(self, parameter):
        """It is whole, in order of the current stream, and whoever asks may write it unseen."""
        self._bring(parameter, keep=False)

    def use(self, parameter):
        """Somebody is about to read it, or to write it so that its version says so."""
        weight = self._weight(parameter)
        if weight is None:
            return
        ledger = self._bring(parameter, keep=True)
        if ledger is not None:
            with ledger.lock:
                self._follow(ledger, id(parameter))

    def _bring(self, parameter, keep):
        weight = self._weight(parameter)
        ledger = self._ledger_of(parameter.device) if weight is not None else None
        if ledger is None:
            return None
        key = id(parameter)
        with ledger.lock:
            stream = ledger.stream()
            if ledger.states.moves(key):
                absent = ledger.states.absent.get(key)
                if absent is not None and absent in ledger.states.away:
                    self._make_room_for(ledger, absent.nbytes, key)
                ledger.states.bring({key}, keep)
            else:
                ledger.states.meet((key,))
            if stream not in weight.streams:
                ledger.tie(parameter, None, stream)
                weight.streams.add(stream)
            if not keep:
                ledger.states.written(key)
            self._by_storage[storage_of(torch.Tensor.detach(parameter))._cdata] = key
            self._used[key] = None
            self._used.move_to_end(key)
        return ledger

    def _follow(self, ledger, key):
        """The order of uses; the next that are away begin to come back."""
        self._order.append(key)
        expected = self._expected
        if self._turn >= len(expected) or expected[self._turn] != key:
            near = range(max(0, self._turn - LOOK), min(len(expected), self._turn + LOOK))
            self._turn = next((turn for turn in near if expected[turn] == key and turn >= self._turn),
                              next((turn for turn in near if expected[turn] == key), len(expected)))
        self._turn += 1
        coming = expected[self._turn : self._turn + LOOK]
        self._make_room_for(ledger, 0, key, set(coming))
        try:
            self._bring_upcoming(ledger, key, coming)
        except RuntimeError:
            ledger.failures["prefetch_failed"] += 1  # not needed yet: whoever needs it hears of the failure

    def _bring_upcoming(self, ledger, key, coming):
        on_their_way = len([one for one in ledger.states.back if one.purpose == FOR_WEIGHTS])
        for upcoming in coming:
            absent = ledger.states.absent.get(upcoming)
            if absent is None or absent not in ledger.states.away:
                continue
            if on_their_way >= AHEAD or not self._make_room_for(ledger, absent.nbytes, key, set(coming)):
                return
            ledger.states.start({upcoming})
            on_their_way += 1

    # ------------------------------------------------------------ leaving

    def make_room(self, ledger, nbytes, keys):
        """For an update of those with these keys. The update has its parameters in a list."""
        if self.active:
            with ledger.lock:
                self._make_room_for(ledger, nbytes, None, keys, ours=1)

    def _make_room_for(self, ledger, nbytes, sparing, coming=frozenset(), ours=0):
        """The least recently used leave. False: some room is missing yet, and nobody else may."""
        if ledger.states.holding or self.stay:
            return False
        try:
            recent = self._order[-RECENT:]
            for key in list(self._used):
                if not ledger.is_short(nbytes):
                    return True
                weight = self._known.get(key)
                if key == sparing or key in coming or key in recent or weight is None or weight() is None or ledger.states.moves(key):
                    continue
                if not weight.is_busy(ours):
                    self._send(ledger, key, weight)
            return not ledger.is_short(nbytes)
        except RuntimeError:
            ledger.failures["no_room_made"] += 1  # no fault of the program, which may have room all the same
            return False

    def _send(self, ledger, key, weight):
        parameter = weight()
        if not self._may_move(ledger, parameter):
            del self._known[key], self._used[key]
            return
        address = storage_of(parameter)._cdata
        ledger.follow(weight.streams | ledger.updated_on)
        sent = ledger.states.send(parameter, weight, FOR_WEIGHTS, keeps=True)
        del parameter
        ledger.states.release(ALL)
        if sent and ledger.states.moves(key):
            self._by_storage.pop(address, None)
            weight.streams.clear()

    # ------------------------------------------------------------ backward

    def pack(self, tensor):
        """What autograd is to have of a tensor that shows a weight; None: it shows none that moves."""
        address = storage_of(tensor)._cdata
        weight = self._known.get(self._by_storage.get(address))
        parameter = weight() if weight is not None else None
        # The address may be another's by now: a program may have given the parameter other memory.
        if parameter is None or storage_of(torch.Tensor.detach(parameter))._cdata != address:
            return None
        return SavedWeight(weight, tensor)

    def unpack(self, saved):
        if saved.shown.data is not None:
            return view_of(storage_of(saved.shown.data), saved.like, saved.geometry)
        parameter = saved.tensor
        self.use(parameter)
        return view_of(storage_of(torch.Tensor.detach(parameter)), saved.like, saved.geometry)
