#!/usr/bin/env python3
"""Runs what training programs do with a GPU, plain and under `terrace run` in each allocator mode, and compares.

    run.py --terrace build/release/bin/terrace [--python PYTHON] [--only ITEM] [--policy FILE] [--jobs N]

Each program of programs/ prints what it computed, the same in every run; its last line is "done". One JSON row for each
item and mode: item, mode, command, outcome ("same", "differs", "failed", or "skipped: why"), seconds, and what was said
where it did not go well. docs/compatibility.md names every item.
"""

import argparse
import concurrent.futures
import json
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
SKIPPED = 77  # what a program ends with where it cannot run here; its last line says why
MODES = ("plain", "native", "terrace")


@dataclass(frozen=True)
class Item:
    name: str
    program: str  # with arguments
    gpus: int = 1
    launcher: str = ""  # in front of the program
    needs: str = ""  # a module


ITEMS = (
    Item("torch.cuda.graph", "cuda_graph.py"),
    Item("torch.compile, default", "compiled.py default"),
    Item("torch.compile, reduce-overhead", "compiled.py reduce-overhead"),
    Item("DataLoader, fork", "loader.py fork"),
    Item("DataLoader, spawn", "loader.py spawn"),
    Item("torch.multiprocessing, CUDA tensors", "shared_tensors.py"),
    Item("MemPool", "mem_pool.py"),
    Item("memory snapshots", "snapshot.py"),
    Item("FSDP2, two GPUs", "sharded.py fsdp2", gpus=2, launcher="-m torch.distributed.run --standalone --nproc-per-node 2"),
    Item("DDP, two GPUs", "sharded.py ddp", gpus=2, launcher="-m torch.distributed.run --standalone --nproc-per-node 2"),
    Item("JAX, default allocator", "jax_default.py", needs="jax"),
    Item("CUDA C++, static cudart", "static_cudart.cu"),
)


def shown_command(item, mode):
    """As docs/compatibility.md has it, from this folder."""
    program = "./static_cudart" if item.program.endswith(".cu") else " ".join(
        part for part in ("python", item.launcher, f"programs/{item.program}") if part)
    return program if mode == "plain" else f"terrace run --allocator {mode} --policy policy.toml -- {program}"


def visible_gpus():
    """Counted by the driver itself: a Python of any kind may run the programs."""
    try:
        listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return listed.stdout.count("GPU ") if listed.returncode == 0 else 0


def why_not(item, options, gpus):
    if gpus == 0:
        return "no CUDA device"
    if gpus < item.gpus:
        return f"needs {item.gpus} GPUs"
    if item.program.endswith(".cu"):
        return "" if shutil.which("nvcc") else "no nvcc"
    module = item.needs or "torch"
    found = subprocess.run([options.python, "-c", f"import {module}"], capture_output=True, check=False)
    return "" if found.returncode == 0 else f"this Python has no {module}"


def program_command(item, options, folder):
    name, *arguments = item.program.split()
    source = HERE / "programs" / name
    if not name.endswith(".cu"):
        return [options.python, *item.launcher.split(), str(source), *arguments]
    binary = folder / "static_cudart"
    if not binary.exists():
        subprocess.run(["nvcc", "-cudart", "static", "-o", str(binary), str(source)], check=True, stdout=sys.stderr)
    return [str(binary)]


def run(item, mode, options, folder):
    """(exit code, lines of stdout, last words on stderr, seconds)"""
    try:
        command = program_command(item, options, folder)
    except subprocess.CalledProcessError as error:
        return error.returncode, [], f"{error.cmd[0]} failed", 0.0
    if mode != "plain":
        command = [str(options.terrace), "run", "--socket", str(folder / "s"), "--listen", "127.0.0.1:0", "--allocator", mode,
                   "--policy", str(options.policy), "--", *command]
    began = time.monotonic()
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=options.timeout, check=False)
        code, out, err = ended.returncode, ended.stdout, ended.stderr
    except subprocess.TimeoutExpired:
        code, out, err = 124, "", f"not done after {options.timeout} s"
    words = [line for line in err.splitlines() if line.strip() and not line.startswith("terrace:")]
    return code, out.splitlines(), words[-1] if words else "", time.monotonic() - began


def row(item, mode, outcome, seconds=None, said=""):
    return {"item": item.name, "mode": mode, "command": shown_command(item, mode), "outcome": outcome,
            "seconds": None if seconds is None else round(seconds, 1), "said": said}


def rows_of(item, options, gpus):
    with tempfile.TemporaryDirectory() as folder:
        return rows_in(Path(folder), item, options, gpus)


def rows_in(folder, item, options, gpus):
    why = why_not(item, options, gpus)
    if why:
        return [row(item, mode, f"skipped: {why}") for mode in MODES]
    rows, plain = [], None
    for mode in MODES:
        code, lines, said, seconds = run(item, mode, options, folder)
        if code == SKIPPED:
            outcome, said = "skipped: " + (lines[-1] if lines else "it did not say why"), ""
        elif code != 0 or lines[-1:] != ["done"]:
            outcome = "failed"
        elif mode == "plain":
            outcome, plain, said = "same", lines, ""
        else:
            outcome = "same" if lines == plain else "differs"
            said = "" if outcome == "same" else f"{lines} instead of {plain}"
        rows.append(row(item, mode, outcome, seconds, said))
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--terrace", type=Path, default=Path("build/release/bin/terrace"))
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--policy", type=Path, default=HERE / "policy.toml")
    parser.add_argument("--only", metavar="ITEM", help="one item, by its name")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one run")
    parser.add_argument("--jobs", type=int, default=1, help="items that run side by side")
    options = parser.parse_args()
    if options.jobs < 1:
        parser.error("--jobs: at least 1")
    chosen = [item for item in ITEMS if options.only in (None, item.name)]
    if not chosen:
        parser.error(f'--only: no item "{options.only}"; there are: ' + "; ".join(item.name for item in ITEMS))
    gpus = visible_gpus()
    good = True
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        for lines in pool.map(lambda item: rows_of(item, options, gpus), chosen):
            for line in lines:
                good = good and line["outcome"] not in ("failed", "differs")
                print(json.dumps(line), flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
