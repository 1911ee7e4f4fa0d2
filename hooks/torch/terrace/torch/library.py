"""libterrace.so by ctypes: the stash of hooks/c_abi/terrace_stash.h, results as exceptions."""

import ctypes
import os
from pathlib import Path

ABI = 2
OUT_OF_BUDGET, OUT_OF_MEMORY = 1, 2
FOR_ACTIVATION, FOR_OPTIMIZER, FOR_GRADIENT, FOR_WEIGHTS = 0, 1, 2, 3


class TerraceError(RuntimeError):
    """What the library answered: `result` is its terrace_result, the text its last error."""

    def __init__(self, result, text):
        super().__init__(text)
        self.result = result

    @property
    def ddr_is_full(self):
        return self.result in (OUT_OF_BUDGET, OUT_OF_MEMORY)


class Options(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("device", ctypes.c_char_p),
        ("device_index", ctypes.c_int32),
        ("policy_file", ctypes.c_char_p),
        ("job", ctypes.c_char_p),
        ("join_daemon", ctypes.c_int32),
        ("ddr_budget", ctypes.c_uint64),
        ("emulated_link", ctypes.c_double),
    ]


class Budgets(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("hbm", ctypes.c_uint64),
        ("ddr", ctypes.c_uint64),
        ("activations", ctypes.c_uint64),
        ("optimizer_tier", ctypes.c_int32),
        ("off", ctypes.c_int32),
    ]


class Lease(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("hbm_bytes", ctypes.c_uint64),
        ("hbm_target_bytes", ctypes.c_uint64),
        ("hbm_used_bytes", ctypes.c_uint64),
        ("ddr_bytes", ctypes.c_uint64),
        ("switched_off", ctypes.c_int32),
        ("overflow_bytes", ctypes.c_uint64),
        ("refusals", ctypes.c_uint64),
    ]


class Counters(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("spills", ctypes.c_uint64),
        ("restores", ctypes.c_uint64),
        ("spilled_bytes", ctypes.c_uint64),
        ("restored_bytes", ctypes.c_uint64),
        ("entries", ctypes.c_uint64),
        ("ddr_bytes", ctypes.c_uint64),
        ("ddr_peak_bytes", ctypes.c_uint64),
        ("spill_stall_seconds", ctypes.c_double),
        ("restore_stall_seconds", ctypes.c_double),
        ("optimizer_stall_seconds", ctypes.c_double),
        ("weights_stall_seconds", ctypes.c_double),
    ]


def library_path():
    """TERRACE_LIBRARY, else beside the folder that holds this package."""
    named = os.environ.get("TERRACE_LIBRARY")
    return Path(named) if named else Path(__file__).resolve().parents[3] / "libterrace.so"


def overflow_of(index):
    """Bytes of device `index` that found no room in HBM and lie in DDR, as the preload library counts; 0 without it."""
    try:
        count = ctypes.CDLL(None).terrace_wall_overflow
    except AttributeError:
        return 0
    count.restype = ctypes.c_uint64
    return count(ctypes.c_int(index))


_SIGNATURES = {
    "terrace_stash_open": [ctypes.POINTER(Options), ctypes.POINTER(ctypes.c_void_p)],
    "terrace_stash_close": [ctypes.c_void_p],
    "terrace_stash_read_budgets": [ctypes.c_void_p, ctypes.POINTER(Budgets)],
    "terrace_stash_read_lease": [ctypes.c_void_p, ctypes.POINTER(Lease)],
    "terrace_stash_give_way": [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64],
    "terrace_stash_spill": [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int,
                            ctypes.POINTER(ctypes.c_uint64)],
    "terrace_stash_depart": [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64],
    "terrace_stash_left": [ctypes.c_void_p, ctypes.c_uint64, ctypes.POINTER(ctypes.c_int32)],
    "terrace_stash_restore": [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_void_p],
    "terrace_stash_await": [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64],
    "terrace_stash_drop": [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64],
    "terrace_stash_note_step": [ctypes.c_void_p, ctypes.c_double, ctypes.c_uint64],
    "terrace_stash_read_counters": [ctypes.c_void_p, ctypes.POINTER(Counters)],
}
_loaded = None


def _load():
    global _loaded
    if _loaded is None:
        library = ctypes.CDLL(str(library_path()))
        if library.terrace_stash_abi() != ABI:
            raise TerraceError(4, f"{library_path()} has another stash interface than this package: install both "
                                  "from one build")
        library.terrace_last_error.restype = ctypes.c_char_p
        library.terrace_default_stash_options.restype = Options
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes = arguments
            function.restype = ctypes.c_int
        _loaded = library
    return _loaded


class Stash:
    """One device's stash. `stream` is a raw CUstream as an int; None on the emulated device."""

    def __init__(self, device, index=0, ddr_budget=0, emulated_link=None, join_daemon=True):
        self._library = _load()
        options = self._library.terrace_default_stash_options()
        options.device = device.encode()
        options.device_index = index
        options.join_daemon = 1 if join_daemon else 0
        options.ddr_budget = ddr_budget
        if emulated_link is not None:
            options.emulated_link = emulated_link
        policy = os.environ.get("TERRACE_POLICY")
        if policy:
            options.policy_file = policy.encode()
        options.job = os.environ.get("TERRACE_JOB", "torch").encode()
        handle = ctypes.c_void_p()
        self._check(self._library.terrace_stash_open(options, handle))
        self._handle = handle

    def _check(self, result):
        if result != 0:
            raise TerraceError(result, self._library.terrace_last_error().decode(errors="replace"))

    def close(self):
        handle, self._handle = self._handle, None
        if handle is not None:
            self._check(self._library.terrace_stash_close(handle))

    def budgets(self):
        read = Budgets(struct_size=ctypes.sizeof(Budgets))
        self._check(self._library.terrace_stash_read_budgets(self._handle, read))
        return read

    def lease(self):
        read = Lease(struct_size=ctypes.sizeof(Lease))
        self._check(self._library.terrace_stash_read_lease(self._handle, read))
        return read

    def give_way(self, used, needed):
        self._check(self._library.terrace_stash_give_way(self._handle, used, needed))

    def counters(self):
        read = Counters(struct_size=ctypes.sizeof(Counters))
        self._check(self._library.terrace_stash_read_counters(self._handle, read))
        return read

    def spill(self, stream, address, nbytes, purpose=FOR_ACTIVATION):
        entry = ctypes.c_uint64()
        self._check(self._library.terrace_stash_spill(self._handle, stream, address, nbytes, purpose, entry))
        return entry.value

    def depart(self, stream, entry):
        self._check(self._library.terrace_stash_depart(self._handle, stream, entry))

    def has_left(self, entry):
        left = ctypes.c_int32()
        self._check(self._library.terrace_stash_left(self._handle, entry, left))
        return left.value != 0

    def restore(self, stream, entry, address):
        self._check(self._library.terrace_stash_restore(self._handle, stream, entry, address))

    def wait_for(self, stream, entry):
        self._check(self._library.terrace_stash_await(self._handle, stream, entry))

    def drop(self, stream, entry):
        self._check(self._library.terrace_stash_drop(self._handle, stream, entry))

    def note_step(self, seconds, held_peak):
        self._check(self._library.terrace_stash_note_step(self._handle, seconds, held_peak))
