#!/usr/bin/env python3
"""The demo as a benchmark: a step under a memory budget with Swap Core, beside full recomputation in the same budget
and beside no budget at all, in one run with one seed."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

STEPS = 24
SYSTEMS = {"fits": "no-budget", "recompute": "full-recomputation", "swapcore": "terrace"}
METRICS = {"ms_per_step": "ms", "tokens_per_second": "tokens/s", "hbm_peak_bytes": "bytes", "ddr_peak_bytes": "bytes"}
ROOT = Path(__file__).resolve().parent.parent


def print_row(case, system, metric, value, unit):
    row = {"bench": "demo", "case": case, "system": system, "metric": metric, "value": value, "unit": unit, "floor": None}
    print(json.dumps(row), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", required=True, type=Path)
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    out = options.build.resolve().parent / "bench" / "demo"
    command = [sys.executable, str(ROOT / "examples" / "demo.py"), "--build", str(options.build), "--out", str(out),
               "--device", options.device, "--steps", str(STEPS)]
    if subprocess.run(command, stdout=sys.stderr, check=False).returncode != 0:
        return 1
    summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    runs = {run["name"]: run for run in summary["runs"]}
    for name, system in SYSTEMS.items():
        for metric, unit in METRICS.items():
            print_row(name, system, metric, runs[name][metric], unit)
    ratio = runs["swapcore"]["ms_per_step"] / runs["recompute"]["ms_per_step"]
    print_row("swapcore-to-recompute", "terrace", "step_time_ratio", ratio, "ratio")
    return 0


if __name__ == "__main__":
    sys.exit(main())
