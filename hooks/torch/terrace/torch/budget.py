"""How many bytes of HBM saved tensors may hold, now."""

import collections

from .round_needs import RoundNeeds

# Where a process stands. `held`: bytes of saved tensors on the device; `states`: of optimizer state that is about to
# leave or back early; `alive`: of all that is saved; `place`: saves and uses in this round; `needs`: what a round like this
# one has needed, None where none is known.
Standing = collections.namedtuple("Standing", ("held", "states", "alive", "place", "in_backward", "needs"))


class FixedBudget:
    """A number of bytes, as a program says, within the lease. `memory`: what PyTorch's allocator
    says of the device; None: nobody says, and what is known of is all."""

    overflow_peak = overflow_rounds = 0

    def __init__(self, nbytes, lease, memory=None):
        self._nbytes = nbytes
        self._lease = lease
        self._memory = memory

    def limit(self, at):
        return min(self._nbytes, max(0, self._lease.limit() - at.states))

    def used(self, at):
        """Bytes on the device that are known of."""
        return at.held + at.states if self._memory is None else self._memory.read().reserved

    def needed(self):
        """Bytes without which a round cannot go on, beside what is saved; None: not known."""
        return 0 if self._memory is None else None

    def left_in(self, needs):
        """What a round with these needs leaves for saved tensors; None: not known."""
        return None

    def room(self, at):
        """Bytes for optimizer state, were all of it away; None: nothing is said of it."""
        return None

    def is_short(self, at, nbytes, working):
        """Whether room for saved tensors would fall below what is `working` at a time; here nobody can say."""
        return False

    def lacks_room_unseen(self):
        """Whether allocations found no room although nothing is known to be saved that could leave."""
        return False

    def note(self, nbytes):
        pass

    def made(self, nbytes):
        pass

    def settled(self, held):
        pass

    def begin_round(self):
        pass

    def end_round(self, at):
        return None

    def wants_cache_back(self):
        """Whether memory that PyTorch keeps and does not use is to go back to the driver; then cache_went_back()."""
        return False

    def end_step(self):
        pass

    def is_roomy(self):
        """Whether hooks may be away until somebody asks again: nobody would notice that less room is left."""
        return False


class DeviceBudget:
    """What the lease leaves beside everything else that the process holds on the device.

    The allocator is read every so many bytes saved or read. Between two readings operators hold memory that nobody sees:
    where the allocator's peak rose it says how much at most, else what was allocated in between does, so a program that
    sets the peak back changes nothing. What a round needed is known by place from then on, whatever it held. In the first
    round nothing is known: most of the room stays free. `most`: saved tensors hold no more, whatever is left.

    Allocations that the wall refused twice lie in DDR (`overflow`): PyTorch counts them as its own, the wall does not.
    """

    READ_EVERY = 64 << 20  # bytes saved or read: asking the allocator takes microseconds
    SPARE = 0.005  # of the budget, for what PyTorch rounds up
    LEAST = 0.05  # of the budget: with less room for saved tensors, others make room
    AT_FIRST = 3  # of the room saved tensors take one part in so many, until a round has shown more
    LARGE = 3  # at first, so many tensors as large as the largest stay free
    HALF_FULL = 0.5  # of the budget in use: below, what leaves in a round that nobody knows leaves out of care
    UNSEEN_AT_FIRST = 0.08  # of the budget: what operators are taken to need before any has been seen
    # Shares of the budget that stay free on top, learned from rounds that were known and did not fit all the same.
    MORE_SLACK = 0.01  # at a time
    MOST_SLACK = 0.12  # where memory lay in DDR
    MOST_SKIPPED = 1024  # looks
    MOST_SLACK_FOR_REFUSALS = 0.05  # where PyTorch had to give back what it caches, and went on, in two rounds running
    FEW_REFUSALS = 2  # in a round cost less than MORE_SLACK, of bytes that move in each

    def __init__(self, memory, lease, most=1 << 62, read_every=READ_EVERY):
        self._most = most
        self._memory = memory
        self._lease = lease
        self._read_every = read_every
        self._since = self._read_every
        self._outside = 0  # held on the device by others than PyTorch's allocator
        self._in_use = 0  # on the device
        self._others = 0  # held by PyTorch's, beside what is saved and on its way; now
        self._drift = 0  # more than a round like this one held at this place
        self._largest = 0
        self._needs = None  # of the round that runs
        self._last = None  # of the last one with backward
        self._begun = None  # the reading that the current stretch began with
        self._made = 0  # bytes allocated by ourselves in this stretch
        self._least_held = None  # of what was saved, in this stretch
        self._slack = 0
        self._is_short = self._wants_cache_back = False
        self._refusals = self._overflow = 0  # when this round began
        self._round_overflow = self._round_peak = 0
        self._refused_often = False  # in the last known round
        self._in_vain = self._looks_to_skip = 0  # of asking for PyTorch's cache
        self.overflow_peak = 0
        self.overflow_rounds = 0

    # ------------------------------------------------------------ what comes from the ledger

    def note(self, nbytes):
        """So much was saved, or has come back."""
        self._since += nbytes
        self._largest = max(self._largest, nbytes)

    def made(self, nbytes):
        """So much was allocated to bring something back."""
        self._made += nbytes

    def settled(self, held):
        """Saved tensors hold so much until the next one is saved or read."""
        self._least_held = held if self._least_held is None else min(self._least_held, held)

    # ------------------------------------------------------------ readings

    def _read(self, at):
        now = self._memory.read()
        self._lease.refresh()
        self._others = max(0, now.allocated - at.held - at.states)
        in_hbm = now.reserved - self._lease.overflow
        self._in_use = max(in_hbm, self._lease.used)
        self._outside = max(0, self._lease.used - in_hbm) if self._lease.used else 0
        self.overflow_peak = max(self.overflow_peak, self._lease.overflow)
        if self._lease.refusals > self._refusals:
            self._press()
        return now

    def _look(self, at):
        """A reading that is one of the round's."""
        self._since = 0
        now = self._read(at)
        self._look_at_cache(now)
        if self._needs is None:
            return
        self._end_stretch(now, at)
        self._begun = (now, at, self._others)
        if at.needs is not None:
            before = at.needs.others(at.place)
            if before is not None:
                self._drift = max(0, self._others - before)

    def _end_stretch(self, now, at):
        """What everything else held at most since the last reading."""
        self._round_overflow = max(self._round_overflow, self._lease.overflow - self._overflow)
        if self._begun is not None:
            then, began_at, others = self._begun
            ours = (began_at.held if self._least_held is None else self._least_held) + min(began_at.states, at.states)
            need = max(now.peak, then.peak) - ours
            if now.peak <= then.peak and now.ever >= then.ever:
                before = began_at.needs.passing_at(began_at.place) if began_at.needs is not None else None
                passing = now.ever - then.ever - self._made
                need = min(need, others + (passing if before is None else min(passing, before)))
            need = max(need, others, self._others)
            self._needs.add(began_at.place, others, need, began_at.alive, began_at.in_backward)
            self._round_peak = max(self._round_peak, need + ours)
        self._made, self._least_held = 0, None

    def _press(self):
        if not self._is_short:
            self._is_short = True
            self._wants_cache_back = self._memory.is_short()

    # ------------------------------------------------------------ what is left

    def limit(self, at):
        if self._since >= self._read_every:
            self._look(at)
        left = self._usable() - self._beside(at) - at.states
        # Care in a round that nobody knows is not yet a want of memory.
        if at.held > left and left < self._most and (self._last is not None or self._is_half_full()):
            self._press()
        return min(self._most, left)

    def _is_half_full(self):
        return self._in_use > self._lease.limit() * self.HALF_FULL

    def _usable(self):
        return int(self._lease.limit() * (1 - self.SPARE)) - self._outside - self._slack

    def _beside(self, at):
        """What saved tensors are to leave free, states on their way apart."""
        if at.needs is not None and self._needs is not None:
            return at.needs.wanted(at.place, at.alive) + self._drift
        if self._last is None:
            room = max(0, self._usable() - self._others - at.states)
            return self._others + max(room - room // self.AT_FIRST, self.LARGE * self._largest)
        others = self._others + self._last.most_passing
        return others if at.in_backward else max(others, self._last.most_in_forward)

    def _passing(self, at):
        if at.needs is not None and self._needs is not None:
            return at.needs.passing(at.place)
        return int(self._lease.limit() * self.UNSEEN_AT_FIRST) if self._last is None else self._last.most_passing

    def _left_as_it_is(self, at):
        self._read(at)
        return self._usable() - self._others - self._passing(at) - at.states

    def used(self, at):
        self._read(at)
        return self._memory.read().reserved - self._lease.overflow + self._outside

    def needed(self):
        if self._last is None:
            return None
        return int((self._outside + max(self._others, self._last.most)) * (1 + self.SPARE))

    def least(self, working):
        """Room for saved tensors that are `working` at a time, below which others make more of it."""
        return max(working, int(self._lease.limit() * self.LEAST))

    def left_in(self, needs):
        return min(self._most, self._usable() - needs.wanted(0, 0))

    def room(self, at):
        return max(0, self._left_as_it_is(at) + at.states - at.held)

    def is_short(self, at, nbytes, working):
        # What is on its way out will be gone, and what is back early came as far as there was room.
        left = self._left_as_it_is(at) + at.states
        wanted = self.least(working)
        short = left - nbytes < (min(wanted, at.alive) if at.in_backward else wanted)
        if short:
            self._press()
        return short

    def lacks_room_unseen(self):
        return self._last is None and self._needs is None and self.overflow_peak > 0

    # ------------------------------------------------------------ rounds

    def begin_round(self):
        self._needs = RoundNeeds()
        self._begun, self._drift = None, 0
        self._made, self._least_held = 0, None
        self._since = self._read_every
        self._lease.refresh()
        self._refusals, self._overflow = self._lease.refusals, self._lease.overflow
        self._round_overflow = self._round_peak = 0

    def end_round(self, at):
        """Gives what the round needed."""
        needs, self._needs = self._needs, None
        if needs is None:
            return None
        self._needs = needs
        self._end_stretch(self._read(at), at)
        self._needs = None
        needs.close()
        if at.needs is not None:
            self._learn_slack()
        if at.in_backward:
            self._last = needs
        self.overflow_rounds += self._round_overflow > 0
        return needs

    def _learn_slack(self):
        """Memory was refused although the round was known. What lay in DDR and would have fitted by its bytes had no room
        among fragments."""
        limit = self._lease.limit()
        beyond = self._round_peak + self._outside - limit
        fragments = self._round_overflow - max(0, beyond)
        few = self.FEW_REFUSALS * (1 + self._slack / (limit * self.MORE_SLACK))
        often = beyond <= 0 and self._lease.refusals - self._refusals > few
        again, self._refused_often = often and self._refused_often, often
        most = self.MOST_SLACK if fragments > 0 else self.MOST_SLACK_FOR_REFUSALS if again else 0
        more = min(self._slack + max(fragments, int(limit * self.MORE_SLACK)), int(limit * most))
        self._slack = max(self._slack, more)

    # ------------------------------------------------------------ what PyTorch caches

    def _look_at_cache(self, now):
        """What lies in DDR and is cached would serve again, and a product whose operands lie there takes a hundred times as
        long: it goes back as soon as it is free. Where that gave nothing, one look after it is skipped, then 2, 4, 8 ..."""
        overflow = self._lease.overflow
        if overflow == 0:
            self._in_vain = self._looks_to_skip = 0
        elif now.reserved - now.allocated >= overflow // 2:
            if self._looks_to_skip == 0:
                self._wants_cache_back = True
            else:
                self._looks_to_skip -= 1

    def end_step(self):
        self._lease.refresh()
        self.overflow_peak = max(self.overflow_peak, self._lease.overflow)
        self._look_at_cache(self._memory.read())

    def wants_cache_back(self):
        wants, self._wants_cache_back = self._wants_cache_back, False
        return wants

    def cache_went_back(self):
        before = self._lease.overflow
        self._lease.refresh()
        self._in_vain = self._in_vain + 1 if self._lease.overflow > before - before // 8 else 0
        self._looks_to_skip = min(self.MOST_SKIPPED, 1 << self._in_vain) if self._in_vain else 0

    def is_roomy(self):
        return self._memory.read().peak + self._outside < self._lease.limit() * 0.9
