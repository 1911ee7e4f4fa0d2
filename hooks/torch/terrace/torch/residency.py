"""Where the storages are that autograd has saved: in HBM, on their way, or in DDR.

One entry a storage, however many views of it were saved. The ledger moves entries so that those in HBM stay
within the budget; it asks the schedule which are needed last. One lock; nothing under it runs user code.
"""

import collections
import heapq
import threading
import weakref

import torch

from .budget import Standing
from .lease import NO_LIMIT
from .library import TerraceError
from .schedule import choose_victims
from .torch_versions import expired, forget, new_storage, revive, view_of
from .travellers import ALL, Travellers

RECENT = 4  # storages read last: their operators may be at work
FAR = 1 << 61
MOST_SAVES = 1 << 15  # in a round that has been read from: without updates nobody says that it is over
PATIENCE = 4  # updates in a round, until one round has had to be ended by an update: from then on each is


class Entry:
    """A saved storage. It lives as long as somebody holds a view that autograd was given."""

    __slots__ = ("__weakref__", "copy", "known", "ledger", "nbytes", "number", "round", "shown", "size", "storage",
                 "stream", "stuck", "version", "views", "waited", "weak")

    def __init__(self, ledger, storage, version, counter, stream):
        self.ledger = ledger
        self.storage = storage  # None: in DDR alone
        self.nbytes = self.size = storage.nbytes()  # that it holds or would; that were saved
        self.version = version
        self.stream = stream  # in whose order the storage may be let go
        self.weak = storage._weak_ref()  # the storage that was saved, so that its address names no other
        self.known = (storage._cdata, counter)  # under which the ledger finds this entry
        self.shown = None  # the same for the storage that it came back in
        self.copy = 0  # in the stash
        self.waited = None  # the streams that have, where it has come back from its copy
        self.stuck = False  # could not leave: stays
        self.round = 0
        self.number = -1  # in the schedule of its round; below zero: of an earlier one
        self.views = []  # (alias that backward is given, geometry)

    def __del__(self):
        self.ledger.gone(self)


class Ledger:
    def __init__(self, stash, device, lease, budget, schedule, streams):
        self.stash = stash
        self.device = device
        self.lease = lease
        self.budget = budget
        self.schedule = schedule
        self._streams = streams
        self.states = Travellers(self)
        self.lock = threading.RLock()
        self.held = 0  # bytes of entries in HBM
        self.held_peak = 0
        self._largest = 0  # entry
        self.reserve = 0  # bytes of gradients that come before the first of them can leave
        self._saved = self._most_saved = 0  # bytes in a round
        self.given_way = 0  # how often the daemon had asked
        self.revived = 0  # bytes that came back without a copy: somebody had kept them
        self.failures = collections.Counter()
        self.closed = False
        self.updated_on = set()  # streams of updates, which write weights
        self.fixed = {}  # storages that others keep anyway: parameters; weak, by address
        self._look_through_at = 64
        self._entries = {}  # by number, weak
        self._by_storage = {}  # by address, weak
        self._heap = []  # (-distance, number): who leaves first
        self._recent = collections.deque(maxlen=RECENT)
        self._gone = collections.deque()
        self._victims = set()
        self._early = 0  # bytes whose copies began before they had to
        self.rounds = 0  # with backward, to their end
        self.spills_in_round = 0
        self._nothing = {}  # by dtype: what an alias shows while its storage is away
        self._alive = 0  # entries of this round
        self._alive_bytes = 0
        self._round = 0
        self._oldest = -1  # number: of those that outlived their round, downwards
        self._updates = 0  # since the round began
        self._patience = PATIENCE
        self._order_length = 0
        self._ahead = 0  # in the schedule's order: up to here all are in HBM, or used
        self._uncopied = collections.deque()  # numbers, oldest first: whose copies may start early

    @property
    def between_rounds(self):
        return self._alive == 0

    def standing(self):
        schedule = self.schedule
        needs = schedule.expected.needs if schedule.expected is not None else None
        return Standing(self.held, self.states.held, self._alive_bytes, schedule.place_now, schedule.in_backward, needs)

    def limit(self):
        return self.budget.limit(self.standing())

    def is_short(self, nbytes=0):
        """With so many bytes more, saved tensors would have hardly any room left beside everything else."""
        working = self.schedule.most_at_work(RECENT)
        if working is None:
            working = min(RECENT * self._largest, max(self._saved, self._most_saved))
        return self.budget.is_short(self.standing(), nbytes, working)

    def spare_in_round(self):
        """Bytes that a round like the last would leave free, were nothing of it to leave, and no gradient nor weight; below
        zero, those that would have to. None: no round is known."""
        last = self.schedule.known[0] if self.schedule.known else None
        left = self.budget.left_in(last.needs) if last is not None and last.needs is not None else None
        if left is None:
            return None
        return left - max(last.bytes, self.budget.least(last.most_at_work(RECENT))) - self.reserve

    def room(self):
        """Bytes for optimizer state in an update, were all of it away; None: nothing is said of it."""
        return self.budget.room(self.standing())

    def stream(self):
        """The raw stream on which this thread works."""
        return self._streams.current(self.device)

    def is_capturing(self):
        """This thread's work is not done but recorded, to be done again and again with the memory as it is now."""
        return self._streams.is_capturing()

    def finish(self):
        """The host waits for all streams."""
        self._streams.finish(self.device)

    def tie(self, alias, owner, user):
        """`user` works on memory that is let go in order of `owner`."""
        if owner != user:
            self._streams.tie(alias, self.device, user)

    def mark(self):
        return self._streams.mark(self.device)

    def wait_for(self, mark):
        """This thread's stream goes on behind the mark."""
        self._streams.wait_for(self.device, mark)

    def follow(self, streams):
        """This thread's stream goes on behind what these have been given."""
        for stream in streams - {self.stream()}:
            self._streams.follow(self.device, stream)

    # ------------------------------------------------------------ entries

    def entry_for(self, storage, version, counter, stream):
        """The entry of a storage that is being saved, new or known. `counter` tells whose version it is."""
        self._settle()
        known = self._by_storage.get((storage._cdata, counter))
        entry = known() if known is not None else None
        if entry is not None and entry.version == version:
            if entry.number < 0:
                self._count_in(entry)
                self._may_leave(entry)
            return entry
        entry = Entry(self, storage, version, counter, stream)
        self._count_in(entry)
        self._by_storage[entry.known] = self._entries[entry.number]
        self._hold(entry)
        return entry

    def _count_in(self, entry):
        """One of the round that runs, or begins with it."""
        if self._alive and self.schedule.uses and len(self.schedule.sizes) >= MOST_SAVES:
            self._end_round_of_survivors()
        if self._alive == 0:
            self._begin_round()
        self._entries.pop(entry.number, None)
        self._alive += 1
        self._alive_bytes += entry.size
        entry.round, entry.number = self._round, self.schedule.save(entry.size)
        self._saved += entry.size
        self._entries[entry.number] = weakref.ref(entry)
        self._uncopied.append(entry.number)

    def _hold(self, entry):
        self.held += entry.nbytes
        self._largest = max(self._largest, entry.nbytes)
        self._may_leave(entry)
        self.budget.note(entry.nbytes)

    def _may_leave(self, entry):
        heapq.heappush(self._heap, (-self.schedule.distance(entry.number), entry.number))

    def _begin_round(self):
        self._heap = [(-FAR, number) for number in self._entries if number < 0]
        heapq.heapify(self._heap)
        self._order_length = self._ahead = 0
        self._uncopied.clear()
        self._recent.clear()
        self.budget.begin_round()
        self.spills_in_round = self._early = 0
        self._most_saved, self._saved = max(self._most_saved, self._saved), 0
        expected = self.schedule.expected
        self._victims = set()
        if expected is not None:
            # Optimizer state that is leaving now has left by the time that all is saved: nothing has to leave for it.
            self._victims = choose_victims(expected, self.limit() + self.states.held)

    def gone(self, entry):
        """From Entry.__del__, on any thread, perhaps in the middle of anything: no lock of ours here."""
        if self.closed:
            return
        if entry.copy:
            try:
                # From here on nothing moves there, and the storage may go in order of its stream.
                self.stash.drop(entry.stream, entry.copy)
            except TerraceError:
                pass
        nbytes = entry.nbytes if entry.storage is not None else 0
        self._gone.append((entry.number, entry.round, entry.size, (entry.known, entry.shown), nbytes, entry.weak))

    def _settle(self):
        """Takes account of what has gone; with the last entry the round is over."""
        while self._gone:
            number, of_round, size, addresses, nbytes, weak = self._gone.popleft()
            self.held -= nbytes
            counts = number >= 0 and of_round == self._round
            if counts:
                self._alive -= 1
                self._alive_bytes -= size
            if counts or number < 0:
                self._entries.pop(number, None)
            for address in addresses:
                found = self._by_storage.get(address)
                if found is not None and found() is None:
                    del self._by_storage[address]
            forget(weak)
            if counts and self._alive == 0:
                self._end_round()

    def _end_round(self):
        self.rounds += 1 if self.schedule.uses else 0
        self.schedule.end(self.budget.end_round(self.standing()))
        self._round += 1
        self._updates = 0

    def _end_round_of_survivors(self):
        """What is still saved keeps its bytes, and leaves first in the next round: nobody knows when it will be read."""
        self._end_round()
        survivors = [entry for entry in (reference() for reference in self._entries.values()) if entry is not None]
        self._entries = {}
        for entry in survivors:
            self._oldest -= 1
            entry.number = self._oldest
            self._entries[entry.number] = weakref.ref(entry)
        self._alive = self._alive_bytes = 0
        self._heap = [(-FAR, number) for number in self._entries]
        heapq.heapify(self._heap)
        self._recent.clear()
        self._uncopied.clear()

    def begin_update(self):
        """On this thread's stream."""
        with self.lock:
            self.updated_on.add(self.stream())
            self._settle()
            if self._alive and self.schedule.uses:
                self._updates += 1
                if self._updates >= self._patience:
                    self._patience = 1
                    self._end_round_of_survivors()
        self.settle()

    def settle(self):
        """Between the passes: what has gone is counted, and what the daemon asks for is given."""
        with self.lock:
            self._settle()
            self.states.purge()
            limit = self.limit()
            if self.lease.asked:
                self._leave_until(limit)
                self._give_way()

    def end_step(self):
        with self.lock:
            self.budget.end_step()
            self._relieve()

    def relieve(self):
        """From a thread of its own, at any time but while something is captured."""
        with self.lock:
            if not self.closed:
                self.lease.refresh()
                if self.lease.overflow > 0:
                    self.budget.end_step()
                    self._relieve()

    def _relieve(self):
        """Memory that PyTorch keeps in DDR, or in pieces, and does not use goes back."""
        if self.budget.wants_cache_back() and not self.is_capturing():
            self._streams.give_back()
            self.budget.cache_went_back()

    def _give_way(self):
        """The daemon asks this process to hold less, and what may leave has left."""
        self.states.release(ALL)
        self._streams.give_back()
        needed = self.budget.needed()
        if needed is None:
            needed = NO_LIMIT  # until a round has shown it, all
        else:
            needed += RECENT * self._largest
        self.lease.give_way(self.budget.used(self.standing()), needed)
        self.given_way += 1

    # ------------------------------------------------------------ leaving

    def _start_copy(self, entry):
        try:
            entry.copy = self.stash.spill(entry.stream, entry.storage.data_ptr(), entry.nbytes)
            self.spills_in_round += 1
        except TerraceError as error:
            self.failures["ddr_full" if error.ddr_is_full else "spill_failed"] += 1
            entry.stuck = True

    def _depart(self, entry):
        """HBM of the entry goes back to PyTorch, in order of its stream. False: it stays."""
        if not entry.copy:
            self._start_copy(entry)
            if entry.stuck:
                return False
        try:
            self._await(entry, entry.stream)
            self.stash.depart(entry.stream, entry.copy)
        except TerraceError:
            self.failures["spill_failed"] += 1
            entry.stuck = True
            return False
        for alias, _ in entry.views:
            alias.data = self._empty(alias.dtype)
        if entry.shown:
            # What may be saved again, or found with others, is from here on the storage that it came back in.
            self._by_storage.pop(entry.known, None)
            forget(entry.weak)
            entry.weak, entry.known, entry.shown = entry.storage._weak_ref(), entry.shown, None
        entry.storage = entry.waited = None
        self.held -= entry.nbytes
        self._ahead = min(self._ahead, self.schedule.place(entry.number))
        return True

    def enforce(self):
        """Entries leave until the rest fits. Those that the plan sends begin to travel as soon as they are saved."""
        limit = self.limit()
        self._start_early(limit)
        self.states.release(self.held - limit)
        if self.held > limit:
            self._leave_until(self.limit())
        if self.lease.asked:
            self._give_way()
        if self.held > self.held_peak:
            self.held_peak = max(self.held_peak, self._idle())
        self._relieve()
        self.budget.settled(self.held)

    def make_way(self, nbytes):
        """So many bytes come back now: who is leaving goes first where there is no room for both."""
        if self.states.leaving:
            self.states.release(self.held + nbytes - self.limit())

    def _idle(self):
        """Bytes in HBM that no operator is at work on, as far as can be told."""
        recent = (self._entries.get(number) for number in set(self._recent))
        entries = (reference() for reference in recent if reference is not None)
        return self.held - sum(e.nbytes for e in entries if e is not None and e.storage is not None)

    def _leave_until(self, limit):
        spared = []
        while self.held > limit and self._heap:
            key, number = heapq.heappop(self._heap)
            reference = self._entries.get(number)
            entry = reference() if reference is not None else None
            if entry is None or entry.storage is None or entry.stuck:
                continue
            if number in self._recent:
                spared.append((key, number))
                continue
            self._depart(entry)
        for item in spared:
            heapq.heappush(self._heap, item)

    def _start_early(self, limit):
        """Copies begin before anybody needs the room: of the plan's victims; without one, of the oldest, as many as the last
        round had too many, or in the first where half is full."""
        if self.schedule.in_backward:
            return
        planned = self.schedule.expected is not None
        last = self.schedule.last_bytes
        while self._uncopied:
            number = self._uncopied[0]
            if planned and number not in self._victims:
                self._uncopied.popleft()
                continue
            if not planned and (self._early >= last - limit if last else self.held * 2 <= limit):
                break
            self._uncopied.popleft()
            reference = self._entries.get(number)
            entry = reference() if reference is not None else None
            if entry is not None and entry.storage is not None and not entry.copy and not entry.stuck:
                self._start_copy(entry)
                self._early += entry.nbytes
                if not planned and not last:
                    break

    # ------------------------------------------------------------ coming back

    def show(self, entry, alias, geometry):
        """One more view of the entry, as it is saved."""
        if entry.storage is None:
            # Saved again after it has left, by whoever still held it then.
            alias.data = self._empty(alias.dtype)
        entry.views.append((alias, geometry))

    def _empty(self, dtype):
        nothing = self._nothing.get(dtype)
        if nothing is None:
            nothing = self._nothing[dtype] = torch.empty(0, dtype=dtype, device=self.device)
        return nothing

    def _fill(self, entry, storage):
        """The aliases show the storage, each as it was saved; their version counters stay."""
        entry.storage = storage
        for alias, geometry in entry.views:
            alias.data = view_of(storage, alias, geometry)
        if entry.known[0] != storage._cdata:
            entry.shown = (storage._cdata, entry.known[1])
            self._by_storage[entry.shown] = weakref.ref(entry)
        self._hold(entry)

    def _bring_kept(self, entry, storage):
        """An entry that has left was held by others all the while: moving it freed nothing, nor will it."""
        self.revived += entry.nbytes
        self.keep(storage)
        self.stash.drop(entry.stream, entry.copy)
        entry.copy = entry.nbytes = 0
        entry.stuck = True
        self._fill(entry, storage)

    def _bring(self, entry, stream):
        kept = revive(entry.weak)
        if kept is not None and kept.nbytes() == entry.nbytes:
            self._bring_kept(entry, kept)
            return
        storage = self.new_storage(entry.nbytes)
        self.stash.restore(stream, entry.copy, storage.data_ptr())
        entry.waited = set()
        entry.stream = stream
        self._fill(entry, storage)

    def _await(self, entry, stream):
        """Where it has come back, its bytes are there in order of this stream. Each that reads them waits, and once."""
        if entry.waited is not None and stream not in entry.waited:
            self.stash.wait_for(stream, entry.copy)
            entry.waited.add(stream)

    def new_storage(self, nbytes):
        self.budget.made(nbytes)
        try:
            return new_storage(nbytes, self.device)
        except RuntimeError:
            # PyTorch has no memory left: all that is not in use leaves, and it may ask again.
            self.failures["out_of_hbm"] += 1
            self._leave_until(0)
            return new_storage(nbytes, self.device)

    def use(self, entry, stream):
        """Backward reads the entry: its bytes are there in order of the stream."""
        if self.closed:
            if entry.storage is None or (entry.waited is not None and not entry.waited):
                raise RuntimeError("terrace: this tensor was saved, and went to DDR, in the parent of a forked process; "
                                   "run forward and backward in one process")
            return
        self._settle()
        first = entry.number >= 0 and not self.schedule.was_used(entry.number)
        if first:
            self.schedule.use(entry.number)
        self._recent.append(entry.number)
        self.budget.note(entry.nbytes)
        if entry.storage is None:
            self._leave_until(max(0, self.limit() - entry.nbytes))
            self._bring(entry, stream)
        self._await(entry, stream)
        if not first and entry.copy:
            # Read again and again: its copy is as good, so it may be the first to leave.
            heapq.heappush(self._heap, (-FAR, entry.number))
        limit = self.limit()
        if self.held > limit:
            self._leave_until(limit)  # gradients have come faster than what was saved went
        self._relieve()
        if self.lease.asked:
            self._give_way()
        self._prefetch(stream)
        if self.held > self.held_peak:
            self.held_peak = max(self.held_peak, self._idle())
        self.budget.settled(self.held)

    def _prefetch(self, stream):
        """What backward reads next comes back as far as there is room; behind the last of it, optimizer state."""
        try:
            if self._bring_upcoming(stream):
                self.states.prefetch(self.limit() - self.held - self.reserve)
        except RuntimeError:
            # Not needed yet: whoever needs it hears of the failure.
            self.failures["prefetch_failed"] += 1

    def _bring_upcoming(self, stream):
        limit = None
        order = self.schedule.order()
        if len(order) != self._order_length:
            self._order_length, self._ahead = len(order), 0
        while self._ahead < len(order):
            number = order[self._ahead]
            reference = self._entries.get(number)
            entry = reference() if reference is not None else None
            if entry is not None and entry.storage is None and not self.schedule.was_used(number):
                limit = self.limit() if limit is None else limit
                if self.held + entry.nbytes > limit:
                    return False
                self._bring(entry, stream)
            self._ahead += 1
        return True

    def close(self):
        """Everything that is away comes back, and nothing leaves any more."""
        with self.lock:
            self._settle()
            stream = self.stream()
            for reference in list(self._entries.values()):
                entry = reference()
                if entry is None:
                    continue
                if entry.storage is None:
                    self._bring(entry, stream)
                self._await(entry, stream)
                entry.waited = None  # all copies have ended when the stash has closed
                if entry.copy:
                    self.stash.drop(stream, entry.copy)
                    entry.copy = 0
            self.closed = True
            self.stash.close()

    def keep(self, storage):
        """Others hold this storage: it never leaves."""
        if storage._cdata in self.fixed:
            return
        self.fixed[storage._cdata] = storage._weak_ref()
        if len(self.fixed) >= self._look_through_at:
            for address, weak in list(self.fixed.items()):
                if expired(weak):
                    forget(weak)
                    del self.fixed[address]
            self._look_through_at = 2 * len(self.fixed) + 64
