#!/usr/bin/env python3
"""Every trace of bench/traces replayed on every allocator: bytes held for each live byte at the worst, and what the calls
cost. The floor of the ratio is 1. Peers are plugins (allocator/replay/allocator_plugin.h): those of BUILD/lib/peers on
a GPU, and what --plugin names."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

TRACES = Path(__file__).resolve().parent / "traces"
BASELINE = {"cuda": "cuda-map", "emulated": "emulated-map"}  # no allocator at all
H200 = ["--budget", "139GiB"]  # where there is no GPU the pool still maps as it would on one


def print_row(case, system, metric, value, unit, floor=None):
    row = {"bench": "fragmentation", "case": case, "system": system, "metric": metric, "value": value, "unit": unit,
           "floor": floor}
    print(json.dumps(row), flush=True)


def replay(options, trace, allocator):
    command = [str(options.build / "bin" / "terrace"), "replay", str(trace), "--allocator", str(allocator), "--device",
               options.device, "--json", *(H200 if options.device == "emulated" else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        print(f"fragmentation: {trace.name} on {allocator}: {done.stderr.strip()}", file=sys.stderr)
        return None
    return json.loads(done.stdout)


def peers_of(options):
    """What bench/peers/build_peers.sh has made; it makes them only where there is a GPU."""
    return [] if options.device == "emulated" else sorted((options.build / "lib" / "peers").glob("*.so"))


def print_rows(case, allocator, report):
    system = BASELINE[report["device"]] if allocator == "baseline" else report["allocator"]
    if report["peak_reserved_bytes"]:
        print_row(case, system, "reserved_ratio", report["reserved_ratio"], "ratio", 1.0)
        print_row(case, system, "peak_reserved_bytes", report["peak_reserved_bytes"], "bytes", report["peak_live_bytes"])
    print_row(case, system, "refused_allocations", report["failures"], "allocations", 0)
    for call in ("allocate", "free"):
        for percentile in ("p50", "p99"):
            print_row(case, system, f"{call}_{percentile}_ns", report[call][f"{percentile}_ns"], "ns")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", required=True, type=Path)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--traces", type=Path, default=TRACES, metavar="FOLDER")
    parser.add_argument("--plugin", action="append", default=[], type=Path, metavar="FILE.so")
    options = parser.parse_args()
    traces = sorted(options.traces.glob("*.trace.gz"))
    if not traces:
        print(f"fragmentation: no *.trace.gz in {options.traces}; bench/record_traces.py writes them", file=sys.stderr)
        return 1
    failed = 0
    allocators = ["terrace", "baseline", *peers_of(options), *options.plugin]
    for trace in traces:
        for allocator in allocators:
            report = replay(options, trace, allocator)
            if report is None:
                failed = 1
            else:
                print_rows(trace.name.removesuffix(".trace.gz"), allocator, report)
    return failed


if __name__ == "__main__":
    sys.exit(main())
