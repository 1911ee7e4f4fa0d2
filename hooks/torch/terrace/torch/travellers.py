"""Tensors that are used now and then: whole in HBM, leaving, in DDR with something in their place, coming back.

Optimizer state, gradients and weights. Whoever moves them says when; what is here keeps order and bytes. Everything
under the ledger's lock.
"""

import collections
import weakref

import torch

from .library import FOR_OPTIMIZER, FOR_WEIGHTS, TerraceError
from .torch_versions import forget, revive, set_data, storage_of, view_of

ALL = 1 << 62  # bytes
MOST_SKIPPED = 1024  # times that one whose memory others show is not sent, before it is tried once more


def stand_in(tensor, purpose):
    """What a tensor shows while it is away. State and gradients are empty, which says what it is. Weights keep their
    shape, which programs ask for at any time, and read as NaN, which nobody overlooks."""
    if purpose != FOR_WEIGHTS:
        return torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    if tensor.is_floating_point() or tensor.is_complex():
        worst = float("nan")
    else:
        worst = True if tensor.dtype is torch.bool else torch.iinfo(tensor.dtype).max
    return torch.full((), worst, dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)


class Traveller:
    """A tensor whose storage is its own, whole. `tensor` gives it, or None once nobody needs it any more."""

    __slots__ = ("copy", "geometry", "keeps", "key", "nbytes", "purpose", "storage", "stream", "tensor", "version")

    def __init__(self, tensor, reference, stream, purpose, keeps):
        self.tensor = reference
        self.key = id(tensor)
        self.geometry = (tensor.size(), tensor.stride(), tensor.storage_offset())
        self.storage = storage_of(tensor)  # while copies read or write it
        self.nbytes = self.storage.nbytes()
        self.stream = stream
        self.purpose = purpose
        self.keeps = keeps  # its copy is good as long as its version is the same
        self.version = tensor._version
        self.copy = 0


class Arrival:
    """Of a tensor that came back. Whoever reads it on another stream goes on behind the mark, and the memory is new there."""

    __slots__ = ("mark", "streams", "tensor")

    def __init__(self, tensor, mark, stream):
        self.tensor = weakref.ref(tensor)
        self.mark = mark
        self.streams = {stream}


class Travellers:
    """Those of one device, in four places."""

    def __init__(self, ledger):
        self._ledger = ledger
        self.held = 0  # bytes in HBM that are on their way out, or back early
        self.moved = collections.Counter()  # bytes both ways, by purpose
        self.leaving = []
        self.away = []
        self.back = []
        self.here = {}  # by key: whole, and a copy that is still good
        self.holding = 0  # above zero, nothing begins to leave
        self.absent = {}  # by key: those away or back, whose tensors show something else
        self._arrivals = {}  # by key, until they leave again
        self._shown = {}  # by key: (who, sends to skip, sends skipped in all), of those whose memory others show

    @property
    def arriving(self):
        """Bytes of storages that no tensor shows yet."""
        return sum(one.nbytes for one in self.back)

    def moves(self, key):
        """A tensor with this key is not simply whole."""
        return key in self.absent or any(one.key == key for one in self.leaving)

    # ------------------------------------------------------------ leaving

    def send(self, tensor, reference, purpose=FOR_OPTIMIZER, keeps=False, stream=None):
        """It begins to leave, behind this stream, where none is named the current one. False: it stays."""
        ledger = self._ledger
        if self.holding or ledger.lease.switched_off or tensor.is_inference() or self._is_shown_elsewhere(tensor):
            return False
        stream = ledger.stream() if stream is None else stream
        known = self.here.pop(id(tensor), None)
        one = known or Traveller(tensor, reference, stream, purpose, keeps)
        try:
            if known is not None:
                if known.tensor() is tensor and known.version == tensor._version:
                    known.stream = stream
                    ledger.tie(tensor, None, stream)
                    ledger.stash.depart(stream, known.copy)  # done long ago, as a rule
                    return self._hide(known, tensor)
                self._end(known)
                one = Traveller(tensor, reference, stream, purpose, keeps)
            ledger.tie(tensor, None, stream)
            one.copy = ledger.stash.spill(stream, one.storage.data_ptr(), one.nbytes, purpose)
        except TerraceError as error:
            ledger.failures["ddr_full" if error.ddr_is_full else "spill_failed"] += 1
            return False
        self.moved[one.purpose] += one.nbytes
        self.held += one.nbytes
        self.leaving.append(one)
        return True

    def release(self, wanted=0, spare=0):
        """HBM of what has left goes back, and that of others, all but the last few, until so many bytes have come back: in order
        of their streams, which wait for the copies."""
        stash = self._ledger.stash
        leaving, self.leaving = self.leaving, []
        for index, one in enumerate(leaving):
            try:
                if wanted > 0 and index < len(leaving) - spare:
                    stash.depart(one.stream, one.copy)
                elif not stash.has_left(one.copy):
                    self.leaving += leaving[index:]  # they leave one behind the other
                    return
            except TerraceError:
                self._ledger.failures["spill_failed"] += 1
                self.held -= one.nbytes
                self._end(one)  # it stays
                continue
            self.held -= one.nbytes
            tensor = one.tensor()
            if tensor is not None and tensor._version != one.version:
                self._end(one)  # changed behind our back: it stays, and the copy is of no use
                continue
            if tensor is None:
                self._end(one)
            elif not self._hide(one, tensor):
                continue
            wanted -= one.nbytes

    def _hide(self, one, tensor):
        """False: others hold its storage, which would live on and be another's than the one that comes back. So it stays, and
        its copy goes: they may write it where no version of the tensor shows it."""
        weak = storage_of(tensor)._weak_ref()
        with torch.inference_mode(False):  # what is made there cannot be saved for backward
            set_data(tensor, stand_in(tensor, one.purpose))
            one.storage = None
            held = revive(weak)
            if held is not None:
                set_data(tensor, view_of(held, tensor, one.geometry))
        forget(weak)
        if held is not None:
            self._end(one)
            skips = min(2 * self._shown.get(one.key, (None, 0, 0))[2] + 1, MOST_SKIPPED)
            self._shown[one.key] = (weakref.ref(tensor), skips, skips)
            return False
        self._shown.pop(one.key, None)
        self._arrivals.pop(one.key, None)
        tensor._terrace_bytes = one.nbytes
        self.away.append(one)
        self.absent[one.key] = one
        return True

    def _is_shown_elsewhere(self, tensor):
        """It was, the last time. PyTorch 1.13 does not tell how many hold a storage before it is let go, so it is tried again,
        ever more seldom."""
        whose, to_skip, skipped = self._shown.get(id(tensor), (None, 0, 0))
        if whose is not None and whose() is not tensor:
            del self._shown[id(tensor)]
        elif to_skip > 0:
            self._shown[id(tensor)] = (whose, to_skip - 1, skipped)
            return True
        return False

    def _end(self, one):
        """The stash forgets it; whoever uses its storage comes behind the copies."""
        self._ledger.stash.drop(one.stream, one.copy)
        one.storage = None
        if self.absent.get(one.key) is one:
            del self.absent[one.key]

    def purge(self):
        """Those that nobody needs any more."""
        for name in ("leaving", "away", "back"):
            staying = []
            for one in getattr(self, name):
                if one.tensor() is None:
                    if name != "away":
                        self.held -= one.nbytes
                    self._end(one)
                else:
                    staying.append(one)
            setattr(self, name, staying)
        for key in [key for key, one in self.here.items() if one.tensor() is None]:
            self._end(self.here.pop(key))
        self._shown = {key: known for key, known in self._shown.items() if known[0]() is not None}
        self._arrivals = {key: arrival for key, arrival in self._arrivals.items() if arrival.tensor() is not None}

    # ------------------------------------------------------------ coming back

    def prefetch(self, room):
        """Those that the next update reads first, as far as there is room."""
        index = 0
        while index < len(self.away):
            one = self.away[index]
            if one.purpose == FOR_WEIGHTS:
                index += 1
                continue
            if one.nbytes > room:
                return
            room -= one.nbytes
            self._start(index)

    def start(self, wanted):
        """Those with these keys that are away begin to come back."""
        for index in [i for i, one in enumerate(self.away) if one.key in wanted][::-1]:
            self._start(index)

    def _start(self, index):
        ledger, one = self._ledger, self.away[index]
        if one.tensor() is not None:
            ledger.make_way(one.nbytes)
            storage = ledger.new_storage(one.nbytes)
            one.stream = ledger.stream()
            ledger.stash.restore(one.stream, one.copy, storage.data_ptr())
            one.storage = storage
            self.moved[one.purpose] += one.nbytes
            self.held += one.nbytes
            self.back.append(one)
        else:
            self._end(one)
        self.away.remove(one)

    def bring_all(self, purposes):
        """Every one of these is whole, in order of the current stream, and its copy forgotten."""
        self.bring({one.key for one in self.away + self.back + self.leaving if one.purpose in purposes}, keep=False)
        for key in [key for key, one in self.here.items() if one.purpose in purposes]:
            self.written(key)
        self.meet(list(self._arrivals))

    def bring(self, wanted, keep):
        self.start(wanted)
        self.wait(wanted, keep)

    def wait(self, wanted, keep):
        """Those with these keys that are not away are whole, in order of the current stream, and stay. `keep`: who
        asks does not write them, or says so by their version: the copy may be of use once more."""
        ledger = self._ledger
        stream = ledger.stream()
        self.meet(wanted)
        arrived = []
        for one in [one for one in self.back if one.key in wanted]:
            ledger.stash.wait_for(stream, one.copy)
            self.back.remove(one)
            self.held -= one.nbytes
            tensor = one.tensor()
            if tensor is None:
                self._end(one)
                continue
            with torch.inference_mode(False):
                set_data(tensor, view_of(one.storage, tensor, one.geometry))
            del tensor._terrace_bytes  # it would be pickled with the tensor
            self.absent.pop(one.key, None)
            ledger.tie(tensor, one.stream, stream)
            one.stream = stream
            arrived.append(tensor)
            self._stay(one, keep)
        mark = ledger.mark() if arrived else None
        if mark is not None:
            self._arrivals.update((id(tensor), Arrival(tensor, mark, stream)) for tensor in arrived)
        for one in [one for one in self.leaving if one.key in wanted]:
            self.leaving.remove(one)
            self.held -= one.nbytes
            # Its bytes are here. Nobody knows yet whether others show them, and write them: the copy goes.
            one.stream = stream
            self._end(one)

    def meet(self, keys):
        """Those of these that are whole are so in order of the current stream too, wherever they came back."""
        if not self._arrivals:
            return
        stream = self._ledger.stream()
        for key in keys:
            arrival = self._arrivals.get(key)
            tensor = arrival.tensor() if arrival is not None and stream not in arrival.streams else None
            if tensor is not None:
                arrival.streams.add(stream)
                self._ledger.wait_for(arrival.mark)
                self._ledger.tie(tensor, None, stream)

    def forget_arrivals(self):
        """The host has waited for all of them."""
        self._arrivals.clear()

    def _stay(self, one, keep):
        if keep and one.keeps:
            one.storage = None  # whose it is alone, as long as the copy is good
            self.here[one.key] = one
        else:
            self._end(one)

    def written(self, key):
        """Somebody may write it in a way that no version shows: its copy is of no use any more."""
        one = self.here.pop(key, None)
        if one is not None:
            self._end(one)
