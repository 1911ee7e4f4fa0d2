"""The parts of the plugin put together: hooks, ledgers by device, optimizer states, counting."""

import sys
import threading
import time

import torch

from . import report
from .budget import DeviceBudget, FixedBudget, TorchMemory
from .lease import Lease
from .library import UNLIMITED, Stash, TerraceError
from .optimizer_states import OptimizerStates
from .residency import Ledger
from .saved_tensors import Parameters, SavedTensors
from .schedule import Schedule
from .streams import CudaStreams, HostStreams


class Settings:
    """What may be said in a program instead of in the policy."""

    def __init__(self, saved_budget=None, smallest=1 << 20, ddr_budget=0, optimizer=None, emulated_link=None,
                 update_room=None, join_daemon=True):
        self.saved_budget = saved_budget  # bytes of HBM for saved tensors; None: as the policy says
        self.smallest = smallest  # bytes of a tensor that is worth moving
        self.ddr_budget = ddr_budget  # 0: as the policy says
        self.optimizer = optimizer  # "hbm" or "ddr"; None: as the policy says
        self.emulated_link = emulated_link  # bytes a second
        self.update_room = update_room  # bytes of HBM for optimizer state in an update; None: as the budget leaves
        self.join_daemon = join_daemon


class Plugin:
    def __init__(self, device, **settings):
        if device not in ("cuda", "emulated"):
            raise ValueError(f'terrace.torch: device "{device}" is not known; use "cuda" or "emulated"')
        self._kind = device
        self._settings = Settings(**settings)
        device_type = "cuda" if device == "cuda" else "cpu"
        self._ledgers = {}
        self._lock = threading.Lock()
        self._off = False
        self._since = None
        self.saved = SavedTensors(self.ledger_of, device_type, self._settings.smallest)
        self.states = OptimizerStates(self.ledger_of, device_type, self._settings.smallest)
        self.states.before_step = self._settle
        self.states.on_step = self._note_step
        self.states.update_room = self._update_room
        self.states.tier_is_ddr = self._settings.optimizer == "ddr"
        self._thread_start = None

    # ------------------------------------------------------------ life

    def start(self):
        Parameters.watch()
        self.states.watch()
        self.saved.install()
        self._install_on_new_threads()
        self._yield_to_transforms()

    def stop(self):
        self.states.bring_all()
        self.states.unwatch()
        self.saved.remove()
        Parameters.unwatch()
        threading.Thread._bootstrap_inner = self._thread_start
        torch.autograd.graph.disable_saved_tensors_hooks = self._transform_guard
        for ledger in self._ledgers.values():
            ledger.close()
        self._off = True

    def end_process(self):
        """At exit: the report. Memory and copies are left to the end of the process."""
        if self._off:
            return
        try:
            report.say(self.figures())
        except (TerraceError, OSError, ValueError):
            pass  # nobody is left to be told
        self._off = True
        for ledger in self._ledgers.values():
            ledger.closed = True
            if self._kind == "emulated":
                ledger.stash.close()

    def after_fork(self):
        """In a child the threads and the device of the parent are gone. One that had not begun may begin here."""
        if self._ledgers:
            self._off = True
            for ledger in self._ledgers.values():
                ledger.closed = True
        self._lock = threading.Lock()

    # ------------------------------------------------------------ parts

    def ledger_of(self, device):
        """The ledger of a device, opened when first asked for. None: nothing moves."""
        if self._off:
            return None
        ledger = self._ledgers.get(device)
        if ledger is None:
            with self._lock:
                ledger = self._ledgers.get(device) or self._open(device)
        return ledger

    def _open(self, device):
        settings = self._settings
        try:
            stash = Stash(self._kind, device.index or 0, settings.ddr_budget, settings.emulated_link,
                          settings.join_daemon)
        except (TerraceError, OSError) as error:
            print(f"terrace: torch: nothing moves in this process: {error}", file=sys.stderr)
            self._off = True
            return None
        budgets = stash.budgets()
        if budgets.off:
            stash.close()
            self._off = True
            return None
        if settings.optimizer is None:
            self.states.tier_is_ddr = budgets.optimizer_in_ddr != 0
        lease = Lease(stash)
        memory = TorchMemory(device) if self._kind == "cuda" else None
        if settings.saved_budget is not None:
            budget = FixedBudget(settings.saved_budget, lease, memory)
        elif budgets.activations != UNLIMITED or memory is None:
            budget = FixedBudget(budgets.activations, lease, memory)
        else:
            budget = DeviceBudget(memory, lease)
        streams = CudaStreams if self._kind == "cuda" else HostStreams
        ledger = Ledger(stash, device, lease, budget, Schedule(), streams)
        self._ledgers[device] = ledger
        return ledger

    def _install_on_new_threads(self):
        """Default hooks belong to a thread: those that start from here on get them too."""
        original = threading.Thread._bootstrap_inner
        saved = self.saved

        def bootstrap(thread):
            saved.install()
            original(thread)

        self._thread_start = original
        threading.Thread._bootstrap_inner = bootstrap

    def _yield_to_transforms(self):
        """torch.func refuses to work under hooks: ours are away while it does."""
        original = torch.autograd.graph.disable_saved_tensors_hooks
        self._transform_guard = original
        saved = self.saved

        class Away:
            def __init__(self, message):
                self._context = original(message)

            def __enter__(self):
                self._ours = saved.installed
                if self._ours:
                    saved.remove()
                return self._context.__enter__()

            def __exit__(self, *error):
                left = self._context.__exit__(*error)
                if self._ours:
                    saved.install()
                return left

        torch.autograd.graph.disable_saved_tensors_hooks = Away

    # ------------------------------------------------------------ counting

    def _update_room(self):
        """What the budgets leave for optimizer state now; None: they say nothing of it."""
        if self._settings.update_room is not None:
            return self._settings.update_room
        rooms = [ledger.budget.room(ledger.held, ledger.states.held) for ledger in self._ledgers.values()]
        known = [room for room in rooms if room is not None]
        return min(known) if known else None

    def _settle(self):
        """Backward is over: what the update does to the allocator is no part of the round."""
        for ledger in self._ledgers.values():
            if not ledger.closed:
                ledger.settle()

    def _note_step(self):
        now = time.monotonic()
        seconds, self._since = (now - self._since if self._since is not None else 0.0), now
        if self._off:
            return
        for ledger in self._ledgers.values():
            ledger.settle()
            ledger.stash.note_step(seconds, ledger.held_peak)
        self._rest_or_wake()

    def _rest_or_wake(self):
        """Where everything fits with room to spare the hooks go away, and this costs nothing; they come back when
        PyTorch's peak has come near the budget. Between steps, where a program has no hooks of its own."""
        ledgers = self._ledgers.values()
        roomy = bool(ledgers) and all(ledger.budget.is_roomy() for ledger in ledgers)
        if not roomy:
            if not self.saved.installed:
                self.saved.install()
        elif self.saved.is_on_top and all(l.rounds >= 2 and l.spills_in_round == 0 for l in ledgers):
            self.saved.remove()

    def figures(self):
        total = dict.fromkeys(("rounds", "changes", "held", "held_peak", "revived_bytes", "spilled_bytes", "restored_bytes",
                               "spills", "restores", "ddr_peak_bytes", "entries", "state_bytes", "given_way"), 0)
        total.update(spill_stall_seconds=0.0, restore_stall_seconds=0.0, optimizer_stall_seconds=0.0)
        total["passed"] = dict(self.saved.passed)
        total["failures"] = {}
        for ledger in self._ledgers.values():
            if ledger.closed:
                continue
            ledger.settle()
            counters = ledger.stash.counters()
            for name in ("spilled_bytes", "restored_bytes", "spills", "restores", "ddr_peak_bytes", "entries",
                         "spill_stall_seconds", "restore_stall_seconds", "optimizer_stall_seconds"):
                total[name] += getattr(counters, name)
            total["rounds"] += ledger.rounds
            total["changes"] += ledger.schedule.changes
            total["given_way"] += ledger.given_way
            total["held"] += ledger.held
            total["held_peak"] += ledger.held_peak
            total["revived_bytes"] += ledger.revived
            total["state_bytes"] += ledger.states.moved
            for name, count in ledger.failures.items():
                total["failures"][name] = total["failures"].get(name, 0) + count
        return total
