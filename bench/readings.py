#!/usr/bin/env python3
"""Takes the readings of docs/benchmarks.md anew, as many as a time limit allows, on the machine that it runs on.

A reading is one benchmark with its options, or one test program under compute-sanitizer. Those that are about bits alone
go first and share the machine (--jobs); each that is timed has it to itself. A reading begins only where the time that
it has taken before still fits, and is ended with all its processes where the limit is reached. OUT/NAME.jsonl keeps its
rows, OUT/NAME.log what it said, OUT/readings.json how each ended.

    python3 bench/readings.py --list
    python3 bench/readings.py --build build/release --out build/readings --seconds 3600 --only 'preload-*'
"""

import argparse
import concurrent.futures
import dataclasses
import fnmatch
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent


@dataclasses.dataclass(frozen=True)
class Reading:
    name: str
    seconds: int  # that it took on one H200, and some more
    command: tuple  # a benchmark and its options; a test program and its filter; a policy and its script; or a run.py
    timed: bool = True
    gpus: int = 1
    sanitizer: str = ""  # a tool of compute-sanitizer (docs/OPERATORS.md)


def bits(case):
    return Reading(f"bits-{case}", 200, ("preload", "--part", "bits", "--size", "small", "--steps", "4", "--case", case), timed=False)


def pressure(case):
    return Reading(f"preload-pressure-{case}", 180, ("preload", "--part", "pressure", "--case", case))


def racecheck(name, program, tests):
    return Reading(f"racecheck-{name}", 540, (program, tests), timed=False, sanitizer="racecheck")


READINGS = (
    *(bits(case) for case in ("gpt-plain", "gpt-checkpoint", "gpt-save_on_cpu", "moe", "moe-checkpoint", "moe-lora")),
    racecheck("selection", "op_dsa_test", "cuda/*.Selects*:cuda/*LongRows*:cuda/*Ties*"),
    racecheck("repeated", "op_dsa_test", "cuda/*SameBitsAgain*"),
    racecheck("dense", "op_attention_test", "cuda/*Every*:cuda/*Groups*:cuda/*Batches*"),
    Reading("preload-shared", 120, ("preload", "--part", "shared")),
    # Two of these fill the machine.
    Reading("preload-bits-full-size", 300, ("preload", "--part", "bits", "--size", "full", "--steps", "2", "--jobs", "2")),
    pressure("gpt-plain"),
    pressure("moe"),
    Reading("preload-idle", 420, ("preload", "--part", "idle")),
    Reading("launch-scan", 15, ("launch_scan",)),
    Reading("oversubscribed-16g", 60, ("oversubscribed", "--block-mib", "256")),
    Reading("oversubscribed-64g", 170, ("oversubscribed",)),
    Reading("swapcore-50-steps", 300, ("swapcore", "--turns", "1", "--steps", "50")),
    Reading("experts-curve", 80, ("experts", "--part", "experts")),
    Reading("experts-optimizer", 70, ("experts", "--part", "optimizer")),
    Reading("experts-larger", 60, ("experts", "--part", "larger")),
    Reading("experts-idle", 60, ("experts", "--part", "idle")),
    Reading("combinations", 240, ("combinations",)),
    Reading("pinning", 90, ("pinning", "--rounds", "1")),
    Reading("copies", 60, ("copies",)),
    Reading("allocator", 120, ("allocator",)),
    Reading("long-context", 240, ("long_context",)),
    Reading("kernels", 120, ("kernels",)),
    Reading("larger-than-hbm", 150, ("examples/pytorch/larger_than_hbm.toml", "examples/pytorch/larger_than_hbm.py")),
    Reading("rings", 40, ("rings",), gpus=2),
    Reading("compatibility-fsdp2", 100, ("tests/hooks/compatibility/run.py", "--only", "FSDP2, two GPUs"), gpus=2),
    Reading("compatibility-ddp", 100, ("tests/hooks/compatibility/run.py", "--only", "DDP, two GPUs"), gpus=2),
)


def chosen(patterns):
    for pattern in patterns:
        if not any(fnmatch.fnmatch(each.name, pattern) for each in READINGS):
            raise SystemExit(f"readings: no reading is named \"{pattern}\"; --list names them")
    return [each for each in READINGS if not patterns or any(fnmatch.fnmatch(each.name, pattern) for pattern in patterns)]


def command_of(reading, options):
    program, *more = reading.command
    if reading.sanitizer:
        return ["compute-sanitizer", "--tool", reading.sanitizer, "--error-exitcode", "1",
                str((options.racecheck_build or options.build) / "bin" / program), f"--gtest_filter={more[0]}"]
    terrace = str(options.build / "bin" / "terrace")
    if program.endswith(".toml"):
        return [terrace, "run", "--listen", "127.0.0.1:0", "--policy", str(ROOT / program), "--", sys.executable, str(ROOT / more[0])]
    if program.endswith("/run.py"):
        return [sys.executable, str(ROOT / program), "--terrace", terrace, *more]
    command = [sys.executable, str(HERE / "run_bench.py"), "--build", str(options.build), "--device", options.device]
    command += [program, *more]
    if program == "preload" and options.clients:
        command += ["--clients", str(options.clients)]
    return command


def take(reading, options, deadline):
    """How it ended: the exit code, "ended by the limit", or "no time"."""
    began = time.monotonic()
    if began + reading.seconds > deadline:
        return {"name": reading.name, "ended": "no time", "seconds": 0}
    with open(options.out / f"{reading.name}.jsonl", "wb") as rows, open(options.out / f"{reading.name}.log", "wb") as log:
        child = subprocess.Popen(command_of(reading, options), stdin=subprocess.DEVNULL, stdout=rows, stderr=log,
                                 start_new_session=True)
        try:
            ended = child.wait(timeout=deadline - began)
        except subprocess.TimeoutExpired:
            ended = "ended by the limit"
        finally:
            try:
                os.killpg(child.pid, signal.SIGKILL)  # what it started, and left
            except ProcessLookupError:
                pass
            child.wait()
    return {"name": reading.name, "ended": ended, "seconds": round(time.monotonic() - began)}


def say(result):
    print(f"{result['name']:<28} {result['seconds']:>5} s  {result['ended']}", file=sys.stderr, flush=True)
    return result


def main(arguments):
    parser = argparse.ArgumentParser(prog="readings", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--list", action="store_true", help="names and seconds")
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "release")
    parser.add_argument("--device", default="cuda", choices=["cuda", "emulated"])
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "readings")
    parser.add_argument("--seconds", type=float, default=3600, help="for all of them (default: an hour)")
    parser.add_argument("--only", action="append", default=[], metavar="PATTERN", help="of names; may be repeated")
    parser.add_argument("--gpus", type=int, default=1, help="that the machine has")
    parser.add_argument("--jobs", type=int, default=1, help="untimed readings side by side")
    parser.add_argument("--clients", type=Path, help="of the benchmark preload")
    parser.add_argument("--racecheck-build", type=Path, help="the build of preset racecheck, for the readings of that name")
    options = parser.parse_args(arguments)
    readings = chosen(options.only)
    if options.list:
        for each in readings:
            print(f"{each.name:<28} {each.seconds:>5} s  {'timed' if each.timed else 'bits '}  {' '.join(each.command)}")
        return 0
    deadline = time.monotonic() + options.seconds
    options.out.mkdir(parents=True, exist_ok=True)
    here = [each for each in readings if each.gpus <= options.gpus]
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as side_by_side:
        untimed = side_by_side.map(lambda each: say(take(each, options, deadline)), (each for each in here if not each.timed))
        results = list(untimed)
    results += [say(take(each, options, deadline)) for each in here if each.timed]
    (options.out / "readings.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0 if all(each["ended"] == 0 for each in results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
