#!/usr/bin/env python3
"""Real training scripts under `terrace run`: the same bits, how much a budget costs, and that no budget costs nothing.

Parts: bits (losses with and without Terrace), pressure (paired with the same script without limits, beside the floor
of the link), idle (no pressure, interleaved pairs), shared (two scripts at a time under one daemon). The scripts are those of bench/clients/, or of --clients DIR under
the same names. --device emulated and --quick try all of it out on a CPU with tiny models. Bits need no quiet machine:
--jobs runs scripts side by side there.
"""

import argparse
import concurrent.futures
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GIB = 1 << 30
GPT, MOE = "gpt_checkpointed.py", "hf_moe_finetune.py"
MODES = {  # what the scripts are asked for
    "gpt-plain": (GPT, ["--mode", "plain"]),
    "gpt-checkpoint": (GPT, ["--mode", "checkpoint"]),
    "gpt-save_on_cpu": (GPT, ["--mode", "save_on_cpu"]),
    "moe": (MOE, ["--no-checkpoint"]),
    "moe-checkpoint": (MOE, []),
    "moe-lora": (MOE, ["--lora", "--no-checkpoint"]),
}
# (case, budget in GiB, as a share of the script's peak in a quick run)
PRESSURE = (("gpt-plain", 48, 0.83), ("gpt-plain", 40, 0.69), ("gpt-plain", 28, 0.49), ("moe", 68, 0.88), ("moe", 62, 0.80))
SMALL = ["--layers", "4"]
PHASES = ("phases.py",)
PARTS = ("bits", "pressure", "idle", "shared")
EMULATED_LINK = 8e9  # bytes a second, each direction: hooks/c_abi/stash_abi.cpp
QUICK = {GPT: "--layers 3 --dim 128 --heads 4 --batch 8 --seq 128 --vocab 256 --steps 3 --warmup 2".split(),
         MOE: "--layers 2 --hidden 128 --experts 4 --top-k 2 --moe-intermediate 128 --batch 4 --seq 128 --vocab 512 --steps 4 "
              "--warmup 2".split()}


def print_row(case, system, metric, value, unit, floor=None):
    row = {"bench": "preload", "case": case, "system": system, "metric": metric, "value": value, "unit": unit, "floor": floor}
    print(json.dumps(row), flush=True)


def floor_seconds(times, absent, state, rates, parts=64):
    """The least time of a step with `absent` bytes away at its peak, by the link alone: docs/benchmarks.md.

    Of the `state` bytes that the optimizer keeps, c may leave and d return during the update instead of in the passes.
    """
    best = None
    most = min(absent, state)
    for c in (most * i / parts for i in range(parts + 1)):
        for d in (most * i / parts for i in range(parts + 1)):
            whole = (max(times["forward"], (absent - c) / rates["d2h"]) + max(times["backward"], (absent - d) / rates["h2d"])
                     + max(times["update"], c / rates["d2h"], d / rates["h2d"], (c + d) / rates["both"]))
            best = whole if best is None else min(best, whole)
    return best


def last_words(stderr):
    """What a script ended with, as far as it said so itself."""
    lines = [line for line in stderr.splitlines() if line.strip() and not line.startswith("terrace:")]
    return lines[-1] if lines else "it said nothing"


def first_difference(got, expected):
    for step, (one, other) in enumerate(zip(got, expected)):
        if one != other:
            return f"step {step}: {one} instead of {other}"
    return f"{len(got)} losses instead of {len(expected)}"


def device_bytes():
    """Bytes in use on the first GPU that programs see, by all processes; None where nobody tells."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] or "0"
    try:
        said = subprocess.run(["nvidia-smi", f"--id={first}", "--query-gpu=memory.used", "--format=csv,noheader,nounits"],
                              capture_output=True, text=True, check=True).stdout
        return int(said) << 20
    except (OSError, ValueError, subprocess.CalledProcessError):
        return None


def ratio_of(rounds):
    return statistics.median(each["terrace"]["ms_per_step"] / each["plain"]["ms_per_step"] for each in rounds)


def median_ms(rounds, side):
    return statistics.median(each[side]["ms_per_step"] for each in rounds)


class Turns:
    """Runs that begin side by side and take their steps one after the other, in their order."""

    def __init__(self, folder):
        self.folder = folder
        self.done = 0  # runs, from the first on
        self.failed = False
        self.changed = threading.Condition()

    def file(self, at):
        return self.folder / str(at)

    def take(self, at, run):
        """What `run` gives, called with what turn.py is to get; {} where one before it gave nothing."""
        if at == 0:
            self.file(0).touch()
        said = {} if self.failed else run((str(self.file(at)), str(self.file(at + 1))))
        with self.changed:
            self.failed = self.failed or not said
            self.changed.wait_for(lambda: self.done == at)
            self.done += 1
            self.file(at + 1).touch()
            self.changed.notify_all()
        return said


class Bench:
    def __init__(self, options):
        self.options = options
        self.peaks = {}  # by case and arguments
        self.clients = options.clients or ROOT / "bench" / "clients"
        self.python = options.python
        self.quick = options.quick or options.device == "emulated"
        self.bad = False
        self.more = ["--deterministic"] if options.deterministic else []  # of everything that is timed

    def policy(self, folder, budget, tier):
        path = folder / "policy.toml"
        path.write_text(f'version = 1\n[hbm]\nbudget = "{int(budget) >> 10}KiB"\nreserve = "0"\n[optimizer]\ntier = "{tier}"\n')
        return path

    def run(self, case, more=(), budget=None, tier="auto", through=()):
        """What the script printed, as dictionaries in one; {} and a word on stderr where it failed."""
        with tempfile.TemporaryDirectory() as folder:
            return self.run_in(Path(folder), case, more, budget, tier, through)

    def run_in(self, folder, case, more, budget, tier, through=()):
        """`through`: a script of bench/clients/ and its arguments, that runs the case's."""
        script, arguments = MODES[case]
        command = [self.python]
        if through:
            command += [str(ROOT / "bench" / "clients" / through[0]), *through[1:]]
        command += [str(self.clients / script), *arguments, *(QUICK[script] if self.quick else []), *more]
        environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PYTHONDONTWRITEBYTECODE": "1"}
        if budget is not None:
            command = [str(self.options.build / "bin" / "terrace"), "run", "--socket", str(folder / "s"), "--listen",
                       "127.0.0.1:0", "--allocator", self.options.allocator, "--policy", str(self.policy(folder, budget, tier)), "--",
                       *command]
            if self.options.device == "emulated":
                environment["TERRACE_TORCH_DEVICE"] = "emulated"
        ended = subprocess.run(command, capture_output=True, env=environment, text=True, check=False)
        print(ended.stderr, end="", file=sys.stderr)
        said = {}
        for line in ended.stdout.splitlines():
            if line.startswith("{"):
                said.update(json.loads(line))
        if ended.returncode != 0 or "losses" not in said:
            print(f"preload: {case} failed with exit code {ended.returncode}: {' '.join(command)}\n"
                  f"preload: {last_words(ended.stderr)}", file=sys.stderr)
            if "losses" in said:
                print("preload: that was after its last step", file=sys.stderr)
            self.bad = True
            return {}
        if "ms_per_step" in said:  # a reading that is cut short has told that much
            limit = "" if budget is None else f" within {int(budget) >> 20} MiB"
            print(f"preload: {case}{limit}: {said['ms_per_step']} ms a step", file=sys.stderr)
        return said

    def peak(self, case, more=()):
        """(all that phases.py says without limits, peak in bytes)"""
        key = case, tuple(more)
        if key not in self.peaks:
            self.peaks[key] = self.measure_peak(case, more)
        return self.peaks[key]

    def measure_peak(self, case, more):
        unlimited = (1 << 40) if self.options.device != "emulated" else (2 << 30)
        plain = self.run(case, more, through=PHASES)
        if plain and plain["peak_bytes"] is None:  # nobody knows it on a CPU but the plugin
            plain["peak_bytes"] = self.run(case, more, unlimited, through=PHASES).get("peak_bytes")
        return plain, plain.get("peak_bytes")

    # ------------------------------------------------------------ parts

    def bits(self):
        sizes = {"small": ("@4-layers", SMALL), "full": ("", [])}
        if self.quick:
            sizes = {"full": sizes["full"]}
        elif self.options.size:
            sizes = {self.options.size: sizes[self.options.size]}
        with concurrent.futures.ThreadPoolExecutor(self.options.jobs) as pool:
            rows = [pool.submit(self.bits_of, case, *size) for size in sizes.values() for case in self.chosen(MODES)]
            for row in rows:
                row.result()

    def bits_of(self, case, size, more):
        more = [*more, "--deterministic"]
        if self.options.steps:
            more += ["--steps", str(self.options.steps), "--warmup", "1"]
        plain, peak = self.peak(case, more)
        if not peak:
            return
        for share in (200, 80, 60, 40) if size or self.quick else (60,):
            got = self.run(case, more, peak * share // 100, self.options.tier)
            same = bool(got) and got["losses"] == plain["losses"]
            if got and not same:
                print(f"preload: {case}{size}@{share}%: {first_difference(got['losses'], plain['losses'])}", file=sys.stderr)
            self.bad = self.bad or not same
            print_row(f"{case}{size}@{share}%", "terrace", "losses_equal", int(same), "bool")

    def pressure(self):
        for case, gib, share in PRESSURE:
            if case not in self.chosen(MODES):
                continue
            plain, peak = self.peak(case, self.more)
            if not peak:
                continue
            budget = int(peak * share) if self.quick else gib * GIB
            name = f"{case}@{int(share * 100)}%" if self.quick else f"{case}@{gib}GiB"
            rates = plain["rates"] or {"d2h": EMULATED_LINK, "h2d": EMULATED_LINK, "both": 2 * EMULATED_LINK}
            times = {phase: ms / 1e3 for phase, ms in plain["times"].items()}
            whole = sum(times.values())
            floor = max(1.0, floor_seconds(times, max(0, peak - budget), plain["state_bytes"], rates) / whole)
            peer = "gpt-save_on_cpu" if case == "gpt-plain" and gib == 28 else None
            rounds = self.rounds(case, self.options.pairs or 3, budget, peer)  # one at a time: who loads uses the link
            if not rounds:
                continue
            ratio = ratio_of(rounds)
            print_row(name, "terrace", "step_time_ratio", ratio, "ratio", floor)
            print_row(name, "terrace", "ratio_to_floor", ratio / floor, "ratio")
            if self.quick or self.options.deterministic:  # else plain's own differ from run to run
                same = all(each["terrace"]["losses"] == each["plain"]["losses"] for each in rounds)
                print_row(name, "terrace", "losses_equal", int(same), "bool")
            if peer:
                print_row(name, "save_on_cpu", "ms_per_step", median_ms(rounds, "peer"), "ms")
                print_row(name, "terrace", "ms_per_step", median_ms(rounds, "terrace"), "ms", floor * median_ms(rounds, "plain"))

    def idle(self):
        size = ""
        if self.options.size == "small" and not self.quick:
            self.more, size = [*self.more, *SMALL], "@4-layers"
        for case in self.chosen(("gpt-plain", "gpt-checkpoint", "moe", "moe-checkpoint")):
            _, peak = self.peak(case, self.more)
            rounds = self.rounds(case, self.options.pairs or 30, peak * 2, jobs=self.options.jobs) if peak else []
            if rounds:
                print_row(f"{case}{size}@no-pressure", "terrace", "step_time_ratio", ratio_of(rounds), "ratio", 1.0)

    def shared(self):
        """Two scripts, which together need a third more than the device's budget."""
        cases = ("gpt-plain", "moe") if self.options.case is None else (self.options.case,) * 2
        more = ["--deterministic", *([] if self.quick else SMALL)]
        plain = [self.peak(case, more) for case in cases]
        if not all(peak for _, peak in plain):
            return
        budget, before, most = sum(peak for _, peak in plain) * 3 // 4, device_bytes(), 0
        with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(2) as pool:
            running = [pool.submit(self.run_in, Path(folder), case, more, budget, self.options.tier) for case in cases]
            while not all(one.done() for one in running):
                most = max(most, (device_bytes() or 0) - (before or 0))
                time.sleep(0.05)
        for case, (alone, _), one in zip(cases, plain, running):
            same = bool(one.result()) and one.result()["losses"] == alone["losses"]
            self.bad = self.bad or not same
            print_row(f"shared/{case}", "terrace", "losses_equal", int(same), "bool")
        if before is not None:
            self.bad = self.bad or most > budget
            print_row("shared", "terrace", "hbm_peak_bytes", most, "B", budget)

    def rounds(self, case, count, budget, peer=None, jobs=1):
        """What each said in each round, all of which take turns at being first; [] where one failed. Of `jobs` that have
        begun one takes its steps."""
        sides = {"plain": (case, None), "terrace": (case, budget), **({"peer": (peer, None)} if peer else {})}
        names = list(sides)
        order = [(turn, names[(place + turn) % len(names)]) for turn in range(count) for place in range(len(names))]

        with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            turns = Turns(Path(folder))

            def take(at):
                case, budget = sides[order[at][1]]
                return turns.take(at, lambda files: self.run(case, self.more, budget, self.options.tier, ("turn.py", *files)))

            said = list(pool.map(take, range(len(order))))
        if not all(said):
            return []
        rounds = [{} for _ in range(count)]
        for (turn, side), one in zip(order, said):
            rounds[turn][side] = one
        return rounds

    def chosen(self, cases):
        return [case for case in cases if self.options.case in (None, case)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--build", required=True, type=Path)
    parser.add_argument("--device", default="auto", choices=["auto", "cuda", "emulated"])
    parser.add_argument("--clients", type=Path, help="folder with the two scripts instead of bench/clients")
    parser.add_argument("--python", default=sys.executable, help="that has PyTorch, and transformers for the moe cases")
    parser.add_argument("--allocator", default="native", choices=["native", "terrace"])
    parser.add_argument("--part", choices=PARTS, help="one part; all where none is named")
    parser.add_argument("--case", choices=list(MODES), help="one script in one mode")
    parser.add_argument("--tier", choices=["auto", "hbm", "ddr"], default="auto", help="of optimizer state")
    parser.add_argument("--pairs", type=int, help="3 under pressure and 30 without, where none is given")
    parser.add_argument("--deterministic", action="store_true", help="in the pairs too")
    parser.add_argument("--quick", action="store_true", help="tiny models, budgets as shares of their peaks")
    parser.add_argument("--size", choices=["small", "full"], help="4 layers, or as the scripts are: both in the bits part "
                        "where none is named, and full without pressure")
    parser.add_argument("--steps", type=int, help="of the bits part, and one before them, instead of the scripts' own")
    parser.add_argument("--jobs", type=int, default=1, help="scripts that run side by side in the bits part; of the pairs "
                        "without pressure, those that have begun, of which one takes its steps")
    options = parser.parse_args()
    if options.jobs < 1:
        parser.error("--jobs: at least 1")
    missing = [name for name in (GPT, MOE) if options.clients and not (options.clients / name).is_file()]
    if missing:
        parser.error(f"--clients: {options.clients} has no {missing[0]}")
    bench = Bench(options)
    for part in PARTS:
        if options.part in (None, part):
            getattr(bench, part)()
    return 1 if bench.bad else 0


if __name__ == "__main__":
    sys.exit(main())
