"""How many bytes of HBM saved tensors may hold, now.

`held` is what they hold, `states` what optimizer state does that is about to leave or back early.
"""

import torch


class FixedBudget:
    """A number of bytes, as the policy's [checkpoint] budget says."""

    def __init__(self, nbytes):
        self.nbytes = nbytes

    def limit(self, held, states, in_backward):
        return self.nbytes

    def room(self, held, states):
        """Bytes for optimizer state, were all of it away; None: nothing is said of it."""
        return None

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


class DeviceBudget:
    """What a device's budget leaves beside everything else that PyTorch holds there.

    In forward everything else counts with the most it was in the last round's forward, so that a round has one limit
    from its first save on. In backward, where gradients take the place of what was saved, it counts as it is. Between
    two readings operators hold memory that nobody saw: the largest such amount, known where a round set a new peak,
    stays free.
    """

    READ_EVERY = 64 << 20  # bytes saved or read: asking the allocator takes microseconds
    SPARE = 0.02  # of the budget, for fragments
    UNSEEN_AT_FIRST = 0.08  # of the budget, until a round has shown it

    def __init__(self, memory, nbytes):
        self._memory = memory
        self._nbytes = nbytes
        self._since = self.READ_EVERY
        self._others = 0  # now
        self._forward_others = 0  # the most in this round's forward
        self._expected_others = 0  # the same of the last round
        self._unseen = int(nbytes * self.UNSEEN_AT_FIRST)
        self._seen_peak = 0
        self._peak_before = 0

    def note(self, nbytes):
        self._since += nbytes

    def limit(self, held, states, in_backward):
        if self._since >= self.READ_EVERY:
            self._since = 0
            allocated = self._memory.allocated()
            self._seen_peak = max(self._seen_peak, allocated)
            self._others = max(0, allocated - held - states)
            if not in_backward:
                self._forward_others = max(self._forward_others, self._others)
        others = self._others if in_backward else max(self._expected_others, self._forward_others)
        return max(0, int(self._nbytes * (1 - self.SPARE)) - others - states - self._unseen)

    def room(self, held, states):
        self._since = self.READ_EVERY
        return max(0, self.limit(held, states, True) + states - held)

    def begin_round(self):
        self._peak_before = self._memory.peak()
        self._seen_peak = self._forward_others = 0
        self._since = self.READ_EVERY

    def end_round(self):
        self._expected_others = self._forward_others
        peak = self._memory.peak()
        if peak > self._peak_before:
            self._unseen = max(0, peak - self._seen_peak)

    def is_roomy(self):
        return self._memory.peak() < self._nbytes * 0.9
