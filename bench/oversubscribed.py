#!/usr/bin/env python3
"""A plain CUDA program whose blocks are twice its HBM budget, beside the same program without a budget.

The program (guests/oversubscribed.cu, static runtime) uses every block in every step. It runs once by itself and once
under `terrace run` with a budget of half its blocks; both must end with the same checksum of every bit. The floor of a
step is the larger of its time without a budget and the time the link takes for what cannot stay: X bytes leave and X
return in every step, so max(X / d2h, X / h2d, 2 X / both), by the rates that the program measured. Ends with an error
where the bits differ or a step takes more than 1.3 times the floor.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

MOST_OVER_FLOOR = 1.3


class BenchError(Exception):
    pass


def run(command, env=None):
    """What the program says of itself: its only line."""
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    sys.stderr.write(done.stderr)
    if done.returncode != 0:
        raise BenchError(f"{' '.join(map(str, command))} ended with {done.returncode}")
    try:
        return json.loads(done.stdout.strip().split("\n")[-1])
    except ValueError as error:
        raise BenchError(f"{command[0]} said no JSON: {done.stdout[:200]!r}") from error


def floor_of(free, absent):
    """Seconds of a step that nothing can beat: what cannot stay travels out and back beside the work."""
    travel = max(absent / free["d2h"], absent / free["h2d"], 2 * absent / free["both"])
    return max(free["step_seconds"], travel)


def rows_of(free, limited, budget, blocks_bytes):
    absent = max(blocks_bytes + free["context_bytes"] - budget, 0)
    floor = floor_of(free, absent)
    case = f"{blocks_bytes >> 20} MiB in {budget >> 20}"

    def row(system, metric, value, unit, least):
        return {"bench": "oversubscribed", "case": case, "system": system, "metric": metric, "value": value, "unit": unit,
                "floor": least}
    equal = free["checksum"] == limited["checksum"]
    return [row("no budget", "step", free["step_seconds"] * 1e3, "ms", None),
            row("terrace", "step", limited["step_seconds"] * 1e3, "ms", floor * 1e3),
            row("terrace", "step_over_floor", limited["step_seconds"] / floor, "ratio", 1.0),
            row("terrace", "bits_equal", 1 if equal else 0, "count", 1)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--build", type=Path, required=True)
    parser.add_argument("--program", type=Path, help="in place of the build's oversubscribed")
    parser.add_argument("--blocks", type=int, default=64)
    parser.add_argument("--block-mib", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--passes", type=int, default=16)
    options = parser.parse_args()
    program = options.program or options.build / "bin" / "oversubscribed"
    if not program.is_file():
        raise BenchError(f"{program} is not built: it needs a CUDA toolkit (TERRACE_CUDA=ON)")
    command = [str(program), "--blocks", str(options.blocks), "--block-mib", str(options.block_mib), "--steps",
               str(options.steps), "--passes", str(options.passes)]
    blocks_bytes = options.blocks * options.block_mib << 20
    budget = blocks_bytes // 2
    free = run(command)
    with tempfile.TemporaryDirectory() as folder:
        policy = Path(folder) / "policy.toml"
        policy.write_text(f'version = 1\n[hbm]\nbudget = "{budget >> 20}MiB"\n[ddr]\nbudget = "{blocks_bytes >> 20}MiB"\n'
                          f'[daemon]\nsocket = "{folder}/terraced.sock"\n[metrics]\nlisten = "127.0.0.1:0"\n', encoding="utf-8")
        limited = run([str(options.build / "bin" / "terrace"), "run", "--policy", str(policy), "--", *command],
                      env={**os.environ, "TERRACE_SOCKET": f"{folder}/terraced.sock"})
    rows = rows_of(free, limited, budget, blocks_bytes)
    for row in rows:
        print(json.dumps(row), flush=True)
    if rows[3]["value"] != 1:
        raise BenchError(f"the bits differ: {free['checksum']} without a budget, {limited['checksum']} with one")
    if rows[2]["value"] > MOST_OVER_FLOOR:
        raise BenchError(f"a step takes {rows[2]['value']:.2f} times its floor, more than {MOST_OVER_FLOOR}")


if __name__ == "__main__":
    try:
        main()
    except BenchError as error:
        sys.exit(f"oversubscribed: {error}")
