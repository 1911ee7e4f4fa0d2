"""The parts of the plugin put together: hooks, ledgers by device, optimizer states, counting."""

import os
import sys
import threading
import time

import torch
from torch.nn.parameter import is_lazy

from . import report
from .allocator import GrowingSegments, KnownMemory, PrivatePools, TorchMemory
from .budget import DeviceBudget, FixedBudget
from .gradients import Gradients
from .lease import Lease
from .library import FOR_GRADIENT, FOR_OPTIMIZER, FOR_WEIGHTS, Stash, TerraceError, overflow_of
from .optimizer_states import OptimizerStates
from .overflow_watch import OverflowWatch
from .parameters import Parameters
from .residency import Ledger
from .saved_tensors import SavedTensors
from .schedule import Schedule
from .streams import CudaStreams, HostStreams
from .torch_versions import gradient_of, storage_of
from .weights import Weights
from .wrappers import Wrappers


OPTIMIZER_TIERS = ("hbm", "ddr", "auto")  # as terrace_stash.h numbers them


class Settings:
    """What may be said in a program instead of in the policy."""

    def __init__(self, saved_budget=None, smallest=1 << 20, ddr_budget=0, optimizer=None, emulated_link=None,
                 update_room=None, join_daemon=True, gradients=None):
        self.saved_budget = saved_budget  # bytes of HBM for saved tensors; None: as the policy says
        self.smallest = smallest  # bytes of a tensor that is worth moving
        self.ddr_budget = ddr_budget  # 0: as the policy says
        self.optimizer = optimizer  # "hbm", "ddr" or "auto"; None: as the policy says
        self.emulated_link = emulated_link  # bytes a second
        self.update_room = update_room  # bytes of HBM for optimizer state in an update; None: as the budget leaves
        self.join_daemon = join_daemon
        self.gradients = gradients  # "ddr": they leave whatever room there is; None: where it is short


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
        self._steps = 0
        self._step_seconds = 0.0
        smallest = self._settings.smallest
        self.weights = Weights(self.ledger_of, device_type, smallest)
        self.saved = SavedTensors(self.ledger_of, device_type, smallest, self.weights)
        self.saved.on_round = self._begin_round
        self.gradients = Gradients(self.ledger_of, smallest)
        self.gradients.always = self._settings.gradients == "ddr"
        self.gradients.make_room = self.weights.make_room
        self.states = OptimizerStates(self.ledger_of, self._ledgers, device_type, smallest)
        self.states.before_step = self._settle
        self.states.on_step = self._note_step
        self.states.update_room = self._update_room
        self.states.make_room = self._make_room_in_update
        self.states.tier_is_ddr = self._settings.optimizer == "ddr"
        self._tier_follows = self._sends = False
        self._wrappers = Wrappers()
        self._watch = OverflowWatch(self._relieve)
        self._segments = GrowingSegments()
        self._pools = PrivatePools()
        if device == "cuda":
            self.saved.lies_in_a_pool = self.gradients.lies_in_a_pool = self._pools.has

    # ------------------------------------------------------------ life

    def start(self):
        Parameters.watch()
        Parameters.on_register = self._on_register
        self.states.watch()
        self.saved.install()
        self._wrappers.threads_begin_and_end_with(self.saved.install, self.saved.remove)
        self._wrappers.transforms_without(self.saved)
        self._wrappers.before_weights_are_read_elsewhere(self.weights.end)
        self._wrappers.before_capture(self._before_capture)
        if self._kind == "cuda":
            torch.cuda._lazy_call(self._watch.begin)  # when CUDA begins, or now
        self._wrappers.before_pools(self._before_pools)
        self._wrappers.before_memory_is_shared(self._segments.end)
        if os.environ.get("TERRACE_ALLOCATOR") == "terrace":
            self._wrappers.name_the_other_allocator()

    def stop(self):
        self._watch.end()
        self.states.bring_all()
        self.weights.end()
        self.gradients.unwatch()
        self.states.unwatch()
        self.saved.remove()
        self._wrappers.undo()
        Parameters.unwatch()
        for ledger in self._ledgers.values():
            ledger.close()
        self._off = True

    def end_process(self):
        """At exit: the report. Memory and copies are left to the end of the process."""
        self._watch.end()
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
        tier = settings.optimizer or OPTIMIZER_TIERS[budgets.optimizer_tier]
        lease = Lease(stash)
        on_gpu = self._kind == "cuda"
        memory = TorchMemory(device, self._segments) if on_gpu else KnownMemory(lambda: self._known_bytes(device))
        if settings.saved_budget is not None:
            budget = FixedBudget(settings.saved_budget, lease, memory if on_gpu else None)
        else:
            budget = DeviceBudget(memory, lease, budgets.activations, min(DeviceBudget.READ_EVERY, budgets.hbm >> 6))
        ledger = Ledger(stash, device, lease, budget, Schedule(), CudaStreams if on_gpu else HostStreams)
        ledger.memory = memory
        self._ledgers[device] = ledger
        self._tier_follows = self._tier_follows or tier == "auto"
        if tier == "ddr":
            self._send_what_updates_need()
        return ledger

    def _send_what_updates_need(self):
        """From now on optimizer state leaves, and gradients and weights where they have no room."""
        if not self._sends:
            self._sends = self.states.tier_is_ddr = True
            self.gradients.watch()
            self._wrappers.zeroing_without(self.gradients.drop_absent)
            self._wrappers.after_apply(self._on_apply)

    def _follow(self, ledger):
        """Where nobody has said in which tier optimizer state is to be: in DDR once saved tensors alone cannot make the room,
        for those have a whole round to travel in and it has not. Or where none of them are seen."""
        if self._tier_follows and not self._sends and (ledger.is_short() or ledger.budget.lacks_room_unseen()):
            self._send_what_updates_need()

    def _relieve(self):
        # Where a program's own hooks take what is saved, nobody else asks for a ledger.
        for index in range(torch.cuda.device_count()):
            if torch.device("cuda", index) not in self._ledgers and overflow_of(index):
                self.ledger_of(torch.device("cuda", index))
        for ledger in list(self._ledgers.values()):
            ledger.relieve()

    def _known_bytes(self, device):
        """On a device without an allocator: what is known to be there."""
        ledger = self._ledgers.get(device)
        if ledger is None:
            return 0
        tensors = []
        for parameter in Parameters.alive():
            tensors += [parameter, gradient_of(parameter)]
        for optimizer in list(self.states.seen):
            tensors += [v for values in optimizer.state.values() if isinstance(values, dict) for v in values.values()]
        storages = {}
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor) and tensor.device == device and tensor.layout is torch.strided:
                storage = storage_of(torch.Tensor.detach(tensor))
                storages[storage._cdata] = storage.nbytes()
        return sum(storages.values()) + ledger.held + ledger.states.arriving

    def _before_pools(self):
        self._segments.end()
        self._pools.note()

    def _before_capture(self):
        """What a graph is about to refer to is whole; what it refers to never moves. Nothing is given back meanwhile."""
        self._watch.end()
        self._before_pools()
        self.weights.end("captured")
        self.states.bring_all()
        for ledger in self._ledgers.values():
            if not ledger.closed:
                ledger.finish()
                ledger.states.forget_arrivals()  # marks of before may not be waited for while work is recorded

    # ------------------------------------------------------------ gradients and weights

    def _tiers(self, device):
        """The ledger of a device where what an update needs may be in DDR, or None."""
        ledger = self.ledger_of(device)
        if ledger is not None:
            self._follow(ledger)
        return ledger if ledger is not None and self.states.tier_is_ddr else None

    def _on_register(self, parameter):
        """A model is being built: on the device, it may be too large already."""
        if (parameter.device.type == ("cuda" if self._kind == "cuda" else "cpu") and not self._off
                and parameter.numel() * parameter.element_size() >= self._settings.smallest):
            ledger = self._tiers(parameter.device)
            if ledger is not None:
                self.weights.building(ledger, Parameters.all, parameter)

    def _on_apply(self, module):
        for parameter in module._parameters.values():
            if parameter is not None and not is_lazy(parameter):
                self._on_register(parameter)

    def _make_room_in_update(self, nbytes, keys):
        for ledger in self._ledgers.values():
            if not ledger.closed:
                self.weights.make_room(ledger, nbytes, keys)

    def _begin_round(self, ledger):
        self._follow(ledger)
        if self.states.tier_is_ddr:
            self.gradients.hook(ledger, Parameters.alive())
            ledger.states.purge()

    # ------------------------------------------------------------ counting

    def _update_room(self):
        """What the budgets leave for optimizer state now; None: they say nothing of it."""
        if self._settings.update_room is not None:
            return self._settings.update_room
        rooms = [ledger.room() for ledger in self._ledgers.values() if not ledger.closed]
        known = [room for room in rooms if room is not None]
        return min(known) if known else None

    def _settle(self):
        """Backward is over: what the update does to the allocator is no part of the round."""
        for ledger in self._ledgers.values():
            if not ledger.closed:
                ledger.begin_update()
                self._follow(ledger)
                if self.states.tier_is_ddr:
                    self.gradients.hook(ledger, Parameters.alive())
                    self.weights.at_rest(ledger, Parameters.all)

    def _note_step(self):
        now = time.monotonic()
        seconds, self._since = (now - self._since if self._since is not None else 0.0), now
        self._steps += 1
        self._step_seconds += seconds
        if self._off:
            return
        for ledger in self._ledgers.values():
            ledger.settle()
            ledger.end_step()
            ledger.stash.note_step(seconds, ledger.held_peak)
        self.weights.next_step()
        self._rest_or_wake()

    def _rest_or_wake(self):
        """Where everything fits with room to spare the hooks go away, and this costs nothing; they come back when
        PyTorch's peak has come near the budget. Between steps, where a program has no hooks of its own."""
        ledgers = self._ledgers.values()
        roomy = bool(ledgers) and all(ledger.budget.is_roomy() for ledger in ledgers)
        if not roomy:
            self.saved.wake()
        elif self.saved.is_on_top and not self.weights.active and all(l.rounds >= 2 and l.spills_in_round == 0 for l in ledgers):
            self.saved.remove()

    def figures(self):
        total = dict.fromkeys(("rounds", "changes", "held", "held_peak", "revived_bytes", "spilled_bytes", "restored_bytes",
                               "spills", "restores", "ddr_peak_bytes", "entries", "state_bytes", "gradient_bytes", "weight_bytes", "hbm_peak_bytes",
                               "hbm_lease_bytes", "given_way", "overflow_peak_bytes", "overflow_rounds"), 0)
        total.update(spill_stall_seconds=0.0, restore_stall_seconds=0.0, optimizer_stall_seconds=0.0, weights_stall_seconds=0.0,
                     steps=self._steps, step_seconds=self._step_seconds)
        total["passed"] = dict(self.saved.passed)
        total["failures"] = {}
        for ledger in self._ledgers.values():
            if ledger.closed:
                continue
            ledger.settle()
            counters = ledger.stash.counters()
            for name in ("spilled_bytes", "restored_bytes", "spills", "restores", "ddr_peak_bytes", "entries",
                         "spill_stall_seconds", "restore_stall_seconds", "optimizer_stall_seconds", "weights_stall_seconds"):
                total[name] += getattr(counters, name)
            total["rounds"] += ledger.rounds
            total["changes"] += ledger.schedule.changes
            total["given_way"] += ledger.given_way
            total["held"] += ledger.held
            total["held_peak"] += ledger.held_peak
            total["revived_bytes"] += ledger.revived
            total["state_bytes"] += ledger.states.moved[FOR_OPTIMIZER]
            total["gradient_bytes"] += ledger.states.moved[FOR_GRADIENT]
            total["weight_bytes"] += ledger.states.moved[FOR_WEIGHTS]
            total["hbm_peak_bytes"] += ledger.memory.read().peak
            total["overflow_peak_bytes"] += ledger.budget.overflow_peak
            total["overflow_rounds"] += ledger.budget.overflow_rounds
            total["hbm_lease_bytes"] += ledger.stash.lease().hbm_bytes
            for name, count in ledger.failures.items():
                total["failures"][name] = total["failures"].get(name, 0) + count
        return total
