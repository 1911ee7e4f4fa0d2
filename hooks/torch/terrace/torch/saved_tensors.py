"""What autograd saves for backward: kept, or in DDR until backward asks.

Installed as the default hooks of saved tensors. PyTorch gives up its own check of version counters where hooks are
installed, so it is made here, with the same words.
"""

import collections
import threading

import torch
from torch.utils.data import get_worker_info

from .parameters import Parameters
from .torch_versions import TELLS_TOP_HOOKS, pop_default_hooks, push_default_hooks, storage_of, top_default_hooks
from .weights import SavedWeight


class Kept:
    """A saved tensor that stays as it is."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor):
        self.tensor = tensor.detach()
        self.version = tensor._version


class Moved:
    """A view of a storage that may be in DDR."""

    __slots__ = ("entry", "size", "tensor", "version")

    def __init__(self, entry, tensor, version, size):
        self.entry = entry
        self.tensor = tensor
        self.version = version
        self.size = size


def counter_of(tensor, storage):
    """Tensors of one storage have one version counter, but for parts that are no views of a whole (unsafe_chunk): those
    are told by themselves."""
    base = tensor._base if tensor._is_view() else tensor
    return 0 if base.numel() * base.element_size() == storage.nbytes() else base._cdata


def check_version(saved, size):
    tensor = saved.tensor
    if tensor._version != saved.version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{tensor.type()} {list(size)}] is at version {tensor._version}; expected version {saved.version} "
            "instead. Hint: enable anomaly detection to find the operation that failed to compute its gradient, with "
            "torch.autograd.set_detect_anomaly(True).")


class SavedTensors:
    """The hooks. `ledger_of` gives a device's ledger, or None where nothing of it is to move."""

    def __init__(self, ledger_of, device_type, smallest, weights):
        self._weights = weights
        self._ledger_of = ledger_of
        self._device_type = device_type
        self._smallest = smallest
        self._parameters = Parameters()
        self.on_round = lambda ledger: None  # before the first save of a round
        self.lies_in_a_pool = lambda device, address: False  # of graphs, or of the program's own
        self.passed = collections.Counter()  # saved tensors that stay, by why
        self._threads = threading.local()

    # ------------------------------------------------------------ hooks

    def pack(self, tensor):
        if self._weights.active:
            saved = self._pack_weight(tensor)
            if saved is not None:
                return saved
        why = self._reason_to_keep(tensor)
        if why is not None:
            if why:
                self.passed[why] += 1
            return Kept(tensor)
        try:
            return self._pack(tensor)
        except RuntimeError:
            # A tensor of a kind that has no storage to look at. It was saved before, so it can be again.
            self.passed["without_storage"] += 1
            return Kept(tensor)

    def _pack_weight(self, tensor):
        if tensor.device.type != self._device_type or tensor.layout is not torch.strided or tensor.is_quantized:
            return None
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.is_conj() or tensor.is_neg():
            return None
        try:
            return self._weights.pack(tensor)
        except RuntimeError:
            return None

    def _reason_to_keep(self, tensor):
        """Why a tensor stays; "": it is too small to be worth counting; None: it may move."""
        if tensor.numel() * tensor.element_size() < self._smallest:
            return ""
        if tensor.device.type != self._device_type:
            return "other_device"
        if type(tensor) is not torch.Tensor:
            return "" if type(tensor) is torch.nn.Parameter else "subclass"
        if tensor.layout is not torch.strided or tensor.is_quantized:
            return "not_dense"
        if tensor.is_conj() or tensor.is_neg():
            return "lazy_view"
        if get_worker_info() is not None:
            return "worker"
        if self._device_type == "cuda" and torch.cuda.is_current_stream_capturing():
            return "captured"
        return None

    def _pack(self, tensor):
        ledger = self._ledger_of(tensor.device)
        if ledger is None:
            return Kept(tensor)
        storage = storage_of(tensor)
        if storage.data_ptr() == 0:
            return Kept(tensor)
        if self.lies_in_a_pool(tensor.device, storage.data_ptr()):
            self.passed["pool"] += 1
            return Kept(tensor)
        version = tensor._version
        alias = tensor.detach()
        geometry = (alias.size(), alias.stride(), alias.storage_offset())
        with ledger.lock:
            if ledger.between_rounds:
                self.on_round(ledger)
            self._parameters.note(ledger)
            if storage._cdata in ledger.fixed:
                return Kept(tensor)
            stream = ledger.stream()
            entry = ledger.entry_for(storage, version, counter_of(tensor, storage), stream)
            ledger.tie(alias, None, stream)  # on which stream it was allocated nobody says
            ledger.show(entry, alias, geometry)
            ledger.enforce()
        return Moved(entry, alias, version, geometry[0])

    def unpack(self, saved):
        if type(saved) is Kept:
            check_version(saved, saved.tensor.size())
            return saved.tensor
        if type(saved) is SavedWeight:
            check_version(saved, saved.geometry[0])
            return self._weights.unpack(saved)
        check_version(saved, saved.size)
        ledger = saved.entry.ledger
        with ledger.lock:
            stream = ledger.stream()
            ledger.use(saved.entry, stream)
            ledger.tie(saved.tensor, saved.entry.stream, stream)
            # Under the lock: from here on another thread may send the entry away, which empties the alias.
            return saved.tensor.detach()

    # ------------------------------------------------------------ installation

    def install(self):
        """On this thread; a thread installs and removes in the manner of a stack."""
        push_default_hooks(self.pack, self.unpack)
        self._threads.installed = True

    def remove(self):
        """False: others are on top, and ours stay. Autograd's own threads have the hooks of who called backward."""
        if not (self.is_on_top if TELLS_TOP_HOOKS else self.installed):
            return False
        pop_default_hooks()
        self._threads.installed = False
        return True

    def wake(self):
        """Installs them again, unless a program's own are there: those go in the manner of a stack, too."""
        if not self.installed and top_default_hooks() is None:
            self.install()

    @property
    def is_on_top(self):
        """Ours are what a tensor saved now would meet. Known from PyTorch 2.1 on; before, never."""
        return top_default_hooks() == (self.pack, self.unpack)

    @property
    def installed(self):
        return getattr(self._threads, "installed", False)
