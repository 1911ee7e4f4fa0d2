#!/usr/bin/env python3
"""Runs one benchmark, prints its rows, and compares them with rows kept earlier. `./dev bench NAME` calls this.

A benchmark is bench/NAME.py or the program bench_NAME of the build. It takes --device D and --build DIR and prints
one JSON object a line: bench, case, system ("terrace", or the peer measured beside it), metric, value, unit, and
floor (the physical limit, or null). Anything else it has to say goes to stderr. Options that are not known here are
the benchmark's. With --peers bench/peers/NAME.py runs after it, under the same rules, and adds the peers' rows.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

FIELDS = ["bench", "case", "system", "metric", "value", "unit", "floor"]
MOST_LOSS = 0.10


class BenchError(Exception):
    pass


def command_of(name, build):
    script = Path(__file__).resolve().parent / f"{name}.py"
    program = build / "bin" / f"bench_{name}"
    if script.is_file() and script.name != Path(__file__).name:
        return [sys.executable, str(script)]
    if program.is_file():
        return [str(program)]
    scripts = {path.stem for path in script.parent.glob("*.py")} - {Path(__file__).stem}
    programs = {path.name[len("bench_"):] for path in (build / "bin").glob("bench_*")}
    raise BenchError(f"no benchmark \"{name}\"; there are: {', '.join(sorted(scripts | programs))}")


def row_of(line, where):
    try:
        row = json.loads(line)
    except ValueError as error:
        raise BenchError(f"{where}: not a row: {line.strip()!r} ({error})") from error
    if not isinstance(row, dict) or list(row) != FIELDS:
        raise BenchError(f"{where}: a row has the fields {', '.join(FIELDS)}, in this order: {line.strip()}")
    return row


def rows_in(file):
    try:
        lines = Path(file).read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise BenchError(f"{file}: {error.strerror}; keep rows with: ./dev bench NAME > {file}") from error
    return [row_of(line, f"{file}:{number}") for number, line in enumerate(lines, 1) if line.strip()]


def higher_is_better(row):
    return row["metric"].endswith("_per_second") or row["unit"].endswith("/s")


def loss_between(old, new):
    """The share lost, negative where something was gained; None where the old value says nothing."""
    if not old["value"] or old["value"] < 0 or new["value"] is None:
        return None
    ratio = new["value"] / old["value"]
    return 1 - ratio if higher_is_better(new) else ratio - 1


def losses_against(old_rows, new_rows):
    """Our own rows that lost more than is let pass. A peer that got slower is no loss of ours."""
    def key(row):
        return tuple(row[field] for field in FIELDS[:4])

    new_by_key = {key(row): row for row in new_rows}
    for old in old_rows:
        if old["system"] != "terrace":
            continue
        new = new_by_key.get(key(old))
        if new is None:
            yield f"{'/'.join(key(old))}: no longer measured"
            continue
        loss = loss_between(old, new)
        if loss is not None and loss > MOST_LOSS:
            yield f"{'/'.join(key(old))}: {old['value']:g} before, {new['value']:g} now: {100 * loss:.1f}% lost"


def rows_of(command, options):
    rows = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        for line in child.stdout:
            if line.strip():
                rows.append(row_of(line, options.name))
                print(json.dumps(rows[-1]), flush=True)
    if child.returncode != 0:
        raise BenchError(f"{options.name} failed with exit code {child.returncode}")
    return rows


def measure(options, more):
    common = ["--device", options.device, "--build", str(options.build)]
    commands = [command_of(options.name, options.build) + common + more]
    if options.peers:
        script = Path(__file__).resolve().parent / "peers" / f"{options.name}.py"
        if not script.is_file():
            raise BenchError(f"{options.name} has no peers of its own to run")
        commands.append([sys.executable, str(script)] + common + more)
    rows = [row for command in commands for row in rows_of(command, options)]
    if not rows:
        raise BenchError(f"{options.name} printed no row")
    return rows


def main(arguments):
    parser = argparse.ArgumentParser(prog="dev bench", description=__doc__.split("\n", 1)[0])
    parser.add_argument("name")
    parser.add_argument("--build", required=True, type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--device", default="auto", choices=["auto", "cuda", "emulated"])
    parser.add_argument("--against", metavar="FILE", help="rows kept earlier; a loss of more than 10%% fails")
    parser.add_argument("--peers", action="store_true", help="also what bench/peers/NAME.py measures")
    options, more = parser.parse_known_args(arguments)
    try:
        old_rows = rows_in(options.against) if options.against else []  # before the long part
        losses = list(losses_against(old_rows, measure(options, more)))
    except BenchError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    for loss in losses:
        print(f"bench: {loss}", file=sys.stderr)
    return 1 if losses else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
