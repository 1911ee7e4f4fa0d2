#!/usr/bin/env python3
"""Records allocation traces for bench/traces/, small enough to keep: OUT/NAME.trace.gz.

  record_traces.py --terrace BIN --out DIR --trainer              the reference trainer, nano, on the emulated device
  record_traces.py --terrace BIN --out DIR --clients FOLDER       both PyTorch scripts of FOLDER, in all their modes
  record_traces.py --terrace BIN --out DIR --list FILE            a JSON list of [NAME, [COMMAND, ARGUMENT...]]
  record_traces.py --terrace BIN --out DIR [--name N] -- CMD...   one command

PyTorch is switched to its cudaMallocAsync backend for the recording: its own allocator asks the driver for segments,
and the trace would hold those, not the tensors. A trace that is too large loses its end, at an event.
"""

import argparse
import gzip
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

MAGIC = b"\x89TRACE\r\n"
VERSION = 1
FIRST_NAME = len(MAGIC) + 2 + 1  # behind the version and the layer (runtime/trace/format.hpp)
STREAM_FOLLOWS, THREAD_FOLLOWS = 4, 8
# The name since PyTorch 2.9, and the one before, which later versions still take.
PYTORCH = {"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync", "PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}
STEPS = ["--warmup", "1", "--steps", "2"]
CLIENT_RUNS = {
    "gpt-plain": ["gpt_checkpointed.py", "--mode", "plain"],
    "gpt-checkpoint": ["gpt_checkpointed.py", "--mode", "checkpoint"],
    "gpt-save-on-cpu": ["gpt_checkpointed.py", "--mode", "save_on_cpu"],
    "moe-plain": ["hf_moe_finetune.py", "--no-checkpoint"],
    "moe-checkpoint": ["hf_moe_finetune.py"],
    "moe-lora-plain": ["hf_moe_finetune.py", "--lora", "--no-checkpoint"],
    "moe-lora-checkpoint": ["hf_moe_finetune.py", "--lora"],
}


class RecordError(Exception):
    pass


def events_begin(trace):
    """The offset behind the header."""
    if trace[: len(MAGIC)] != MAGIC or int.from_bytes(trace[len(MAGIC) : len(MAGIC) + 2], "little") != VERSION:
        raise RecordError("not a trace of version 1")
    at = FIRST_NAME
    for _ in range(2):
        at += 1 + trace[at]
    return at


def event_ends(trace):
    """The offset behind each whole event."""
    at = events_begin(trace)
    ends = [at]
    while at < len(trace):
        head = trace[at]
        numbers = 2 + bool(head & STREAM_FOLLOWS) + bool(head & THREAD_FOLLOWS)
        at += 1
        while numbers and at < len(trace):
            numbers -= trace[at] < 0x80
            at += 1
        if numbers:
            break
        ends.append(at)
    return ends


def packed(trace):
    """The same bytes every time: no name and no time in the header."""
    return gzip.compress(trace, compresslevel=9, mtime=0)


def cut_to(trace, most_bytes):
    """The longest beginning of whole events that fits, compressed, and its share of the events."""
    ends = event_ends(trace)
    low, high = 0, len(ends) - 1
    if len(packed(trace[: ends[high]])) <= most_bytes:
        return packed(trace[: ends[high]]), 1.0
    while low < high:  # ends[low] fits
        middle = (low + high + 1) // 2
        if len(packed(trace[: ends[middle]])) <= most_bytes:
            low = middle
        else:
            high = middle - 1
    return packed(trace[: ends[low]]), low / (len(ends) - 1)


def record(options, name, command):
    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder) / "trace"
        line = [str(options.terrace), "run", "--record", str(raw), "--", *command]
        print(f"record_traces: {name}: {' '.join(command)}", file=sys.stderr)
        try:
            done = subprocess.run(line, env={**os.environ, **PYTORCH}, stdout=sys.stderr, check=False)
        except OSError as error:
            raise RecordError(f"{options.terrace}: {error.strerror}") from error
        if done.returncode != 0:
            raise RecordError(f"{name}: the command ended with code {done.returncode}")
        # A launcher leaves the file to the process that it starts.
        recorded = max(Path(folder).glob("trace*"), key=lambda path: path.stat().st_size)
        trace = recorded.read_bytes()
    if not trace:
        raise RecordError(f"{name}: nothing was recorded; is the program linked against a shared CUDA runtime?")
    bytes_kept, share = cut_to(trace, int(1024 * options.most_kib))
    file = options.out / f"{name}.trace.gz"
    file.write_bytes(bytes_kept)
    cut = "" if share == 1.0 else f", the first {100 * share:.0f}% of its events"
    print(f"record_traces: {file}: {len(bytes_kept) / 1024:.0f} KiB{cut}", file=sys.stderr)


def trainer_run(options):
    trainer = Path(options.terrace).resolve().parent / "moe_trainer"
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
    import demo  # pylint: disable=import-outside-toplevel  # the text that the demo trains on
    return [str(trainer), "--device", "emulated", "--steps", "3", "--seed", "1", "--no-progress", "--data",
            *(str(path) for path in demo.text_files())]


def runs_of(options):
    """(name, command) of everything that was asked for."""
    runs = []
    if options.trainer:
        runs.append(("trainer-nano", trainer_run(options)))
    if options.clients:
        for name, (script, *arguments) in CLIENT_RUNS.items():
            runs.append((name, [options.python, str(options.clients / script), *arguments, *STEPS]))
    if options.list:
        runs += [(name, list(command)) for name, command in json.loads(options.list.read_text(encoding="utf-8"))]
    if options.command:
        stem = next((Path(word).stem for word in options.command if word.endswith(".py")), Path(options.command[0]).stem)
        runs.append((options.name or stem, options.command))
    return runs


def main(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--terrace", required=True, type=Path, help="the terrace program of a build")
    parser.add_argument("--out", required=True, type=Path, help="the folder that the traces go into")
    parser.add_argument("--most-kib", type=float, default=300, help="of a compressed trace (default 300)")
    parser.add_argument("--trainer", action="store_true")
    parser.add_argument("--clients", type=Path, metavar="FOLDER")
    parser.add_argument("--python", default=sys.executable, help="the interpreter for --clients")
    parser.add_argument("--list", type=Path, metavar="FILE")
    parser.add_argument("--name", help="of the trace of CMD")
    split = arguments.index("--") if "--" in arguments else len(arguments)
    options = parser.parse_args(arguments[:split])
    options.command = arguments[split + 1 :]
    runs = runs_of(options)
    if not runs:
        parser.error("nothing to record: give --trainer, --clients, --list or -- CMD...")
    options.out.mkdir(parents=True, exist_ok=True)
    failed = 0
    for name, command in runs:
        try:
            record(options, name, command)
        except RecordError as error:
            print(f"record_traces: {error}", file=sys.stderr)
            failed = 1
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
