"""How many bytes of HBM saved tensors may hold, now: `held` is what they hold, `states` what optimizer states do
that may leave."""

import torch


class FixedBudget:
    """A number of bytes, as the policy's [checkpoint] budget says."""

    def __init__(self, nbytes):
        self.nbytes = nbytes

    def limit(self, held, states):
        return self.nbytes

    def note(self, nbytes):
        pass

    def end_round(self):
        pass


class DeviceBudget:
    """What a device's budget leaves beside everything else that PyTorch holds there.

    Everything else is read from PyTorch's allocator, and kept at the most it was in the last round, so that a
    round has one limit. Between two readings operators hold memory that nobody saw: the largest such amount,
    known from the allocator's own peak, stays free.
    """

    READ_EVERY = 64 << 20  # bytes saved or read: asking the allocator takes microseconds
    SPARE = 0.02  # of the budget, for fragments

    def __init__(self, device, nbytes):
        self._device = device
        self._nbytes = nbytes
        self._since = self.READ_EVERY
        self._others = 0
        self._others_now = 0
        self._seen_peak = 0
        self._unseen = 0

    def note(self, nbytes):
        self._since += nbytes

    def limit(self, held, states):
        if self._since >= self.READ_EVERY:
            self._since = 0
            allocated = torch.cuda.memory_allocated(self._device)
            self._seen_peak = max(self._seen_peak, allocated)
            self._others_now = max(self._others_now, allocated - held - states)
        others = max(self._others, self._others_now)
        return max(0, int(self._nbytes * (1 - self.SPARE)) - others - states - self._unseen)

    def end_round(self):
        peak = torch.cuda.max_memory_allocated(self._device)
        self._unseen = max(self._unseen, peak - self._seen_peak)
        self._others, self._others_now = self._others_now, 0
        self._since = self.READ_EVERY
