"""How many bytes of HBM saved tensors may hold, now.

`held` is what they hold, `states` what optimizer state does that is about to leave or back early.
"""

import torch


class FixedBudget:
    """A number of bytes, as a program says, within the lease. `memory`: what PyTorch's allocator
    says of the device; None: nobody says, and what is known of is all."""

    def __init__(self, nbytes, lease, memory=None):
        self._nbytes = nbytes
        self._lease = lease
        self._memory = memory

    def limit(self, held, states, in_backward):
        return min(self._nbytes, max(0, self._lease.limit() - states))

    def used(self, held, states):
        """Bytes on the device that are known of."""
        return held + states if self._memory is None else self._memory.reserved()

    def needed(self):
        """Bytes without which a round cannot go on, beside what is saved; None: not known."""
        return 0 if self._memory is None else None

    def room(self, held, states):
        """Bytes for optimizer state, were all of it away; None: nothing is said of it."""
        return None

    def is_short(self, held, states, nbytes, working):
        """Whether room for saved tensors would fall below what is `working` at a time; here nobody can say."""
        return False

    def note(self, nbytes):
        pass

    def begin_round(self):
        pass

    def end_round(self):
        pass

    def is_roomy(self):
        """Whether hooks may be away until somebody asks again: nobody would notice that less room is left."""
        return False


class TorchMemory:
    """What PyTorch's allocator says of a device."""

    def __init__(self, device):
        self._device = device

    def allocated(self):
        return torch.cuda.memory_allocated(self._device)

    def peak(self):
        return torch.cuda.max_memory_allocated(self._device)

    def reserved(self):
        return torch.cuda.memory_reserved(self._device)


class KnownMemory:
    """The same where no allocator can be asked, as on the emulated device: what is known of is all there is."""

    def __init__(self, known):
        self._known = known
        self._peak = 0

    def allocated(self):
        now = self._known()
        self._peak = max(self._peak, now)
        return now

    def peak(self):
        return self._peak

    def reserved(self):
        return self.allocated()


class DeviceBudget:
    """What the lease leaves beside everything else that the process holds on the device.

    In forward everything else counts with the most it was in the last round's forward, so that a round has one limit
    from its first save on. In backward, where gradients take the place of what was saved, it counts as it is. Between
    two readings operators hold memory that nobody saw: the largest such amount, known where a round set a new peak,
    stays free. `most`: saved tensors hold no more, whatever is left.
    """

    READ_EVERY = 64 << 20  # bytes saved or read: asking the allocator takes microseconds
    SPARE = 0.02  # of the budget, for fragments
    LEAST = 0.05  # of the budget: with less room for saved tensors, others make room
    UNSEEN_AT_FIRST = 0.08  # of the budget, until a round has shown it

    def __init__(self, memory, lease, most=1 << 62, read_every=READ_EVERY):
        self._most = most
        self._memory = memory
        self._lease = lease
        self._read_every = read_every
        self._outside = 0  # held on the device by others than PyTorch's allocator
        self._since = self._read_every
        self._others = 0  # now
        self._forward_others = 0  # the most in this round's forward
        self._expected_others = 0  # the same of the last round
        self._unseen = None
        self._seen_peak = 0
        self._peak_before = 0

    def note(self, nbytes):
        self._since += nbytes

    def limit(self, held, states, in_backward):
        return min(self._most, self._left(held, states, in_backward))

    def _left(self, held, states, in_backward):
        nbytes = self._lease.limit()
        if self._since >= self._read_every:
            self._since = 0
            allocated = self._memory.allocated()
            self._seen_peak = max(self._seen_peak, allocated)
            self._others = max(0, allocated - held - states)
            self._outside = max(0, self._lease.used - self._memory.reserved()) if self._lease.used else 0
            if not in_backward:
                self._forward_others = max(self._forward_others, self._others)
        others = self._others if in_backward else max(self._expected_others, self._forward_others)
        return max(0, int(nbytes * (1 - self.SPARE)) - self._outside - others - states - self._unseen_of(nbytes))

    def _unseen_of(self, nbytes):
        return int(nbytes * self.UNSEEN_AT_FIRST) if self._unseen is None else self._unseen

    def used(self, held, states):
        return self._memory.reserved() + self._outside

    def needed(self):
        if self._unseen is None:
            return None
        others = max(self._others, self._expected_others, self._forward_others)
        return int((self._outside + others + self._unseen) * (1 + self.SPARE))

    def room(self, held, states):
        self._since = self._read_every
        return max(0, self._left(held, states, True) + states - held)

    def is_short(self, held, states, nbytes, working):
        self._since = self._read_every
        room = self._left(held, states, True) - nbytes
        return room < max(working, int(self._lease.limit() * self.LEAST))

    def begin_round(self):
        self._peak_before = self._memory.peak()
        self._seen_peak = self._forward_others = 0
        self._since = self._read_every

    def end_round(self):
        self._expected_others = self._forward_others
        peak = self._memory.peak()
        if peak > self._peak_before:
            self._unseen = max(0, peak - self._seen_peak)

    def is_roomy(self):
        return self._memory.peak() + self._outside < self._lease.limit() * 0.9
