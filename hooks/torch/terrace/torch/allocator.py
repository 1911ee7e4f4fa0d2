"""What PyTorch's allocator says of a device, and the one thing that is asked of it: segments that grow in place."""

import bisect
import collections
import os
import sys

import torch

# Bytes. `ever`: of all allocations since the start, which tells what was allocated between two readings.
Reading = collections.namedtuple("Reading", ("allocated", "peak", "reserved", "ever"))


class TorchMemory:
    def __init__(self, device, segments):
        self._device = device
        self._segments = segments

    def read(self):
        stats = torch.cuda.memory_stats_as_nested_dict(self._device)
        held = stats.get("allocated_bytes", {}).get("all", {})
        kept = stats.get("reserved_bytes", {}).get("all", {})
        return Reading(held.get("current", 0), held.get("peak", 0), kept.get("current", 0), held.get("allocated", 0))

    def is_short(self):
        """Memory is short: fragments begin to count. True: from now on there are fewer, and what is cached is none."""
        return self._segments.begin()


class KnownMemory:
    """The same where no allocator can be asked, as on the emulated device: what is known of is all there is."""

    def __init__(self, known):
        self._known = known
        self._peak = 0

    def read(self):
        now = self._known()
        self._peak = max(self._peak, now)
        return Reading(now, self._peak, now, 0)

    def is_short(self):
        return False


class PrivatePools:
    """The segments of graphs, and of pools of the program's own: what lies there stays.

    Graph trees (torch.compile, mode "reduce-overhead") give one graph the tensors of another by address, and refuse memory
    that another stream has used.
    """

    def __init__(self):
        self._used = False
        self._known = {}  # by device: what was reserved then, where the segments begin, and where they end

    def note(self):
        """There are some, or soon will be."""
        self._used = True

    def has(self, device, address):
        if not self._used and "torch._inductor.cudagraph_trees" not in sys.modules:
            return False
        try:
            reserved = self._reserved(device)
            if self._known.get(device, (None,))[0] != reserved:
                spans = sorted((each["address"], each["address"] + each["total_size"]) for each in self._segments(device)
                               if tuple(each.get("segment_pool_id", (0, 0))) != (0, 0))
                self._known[device] = reserved, [begin for begin, _ in spans], [end for _, end in spans]
        except RuntimeError:  # a backend that does not tell
            return False
        _, begins, ends = self._known[device]
        at = bisect.bisect_right(begins, address) - 1
        return at >= 0 and address < ends[at]

    @staticmethod
    def _reserved(device):
        """It is another whenever a segment has come, grown or gone."""
        of_all = torch.cuda.memory_stats_as_nested_dict(device).get("reserved_bytes", {}).get("all", {})
        return of_all.get("allocated"), of_all.get("freed")

    @staticmethod
    def _segments(device):
        index = torch.device(device).index
        return [each for each in torch.cuda.memory_snapshot() if each["device"] == index]


class GrowingSegments:
    """PyTorch's expandable segments, switched on while a process runs, where nobody has decided on them.

    A segment that grows in place can be cut for tensors of any size, so hardly any memory is reserved and unused. They
    are not for graphs, for pools of their own, or for tensors that other processes share: whoever uses those decides.
    """

    _SAID = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")

    def __init__(self):
        self._open = not any(os.environ.get(name) for name in self._SAID)
        self.on = False

    def begin(self):
        if not self._open:
            return False
        try:
            if torch.cuda.is_current_stream_capturing():
                return False
            self._open = False
            if torch.cuda.get_allocator_backend() != "native" or self._settings():
                return False
            self._set("True")
            self.on = True
        except Exception:  # PyTorch before 2.1, or one that has other names: memory stays as it is
            self._open = False
        return self.on

    def end(self):
        """Somebody needs ordinary segments: from now on, and for good."""
        self._open = False
        if self.on:
            self.on = False
            try:
                self._set("False")
            except Exception:  # as above
                pass

    @staticmethod
    def _settings():
        """What the program has set itself, as text."""
        ask = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
        if ask is not None:
            return ask()
        return torch.cuda.memory._snapshot()["allocator_settings"]["PYTORCH_CUDA_ALLOC_CONF"]

    @staticmethod
    def _set(value):
        change = getattr(torch._C, "_accelerator_setAllocatorSettings", None) or torch.cuda.memory._set_allocator_settings
        change(f"expandable_segments:{value}")
