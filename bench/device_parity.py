#!/usr/bin/env python3
"""Trains the same model from the same seed on the emulated device and on a GPU, and compares the losses.

Both compute in fp32; operators differ in the order of their sums. Rows: the largest difference of two losses of one step
over the run (case "fp32"), and each device's step time.
"""
import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import training_runs  # noqa: E402  the text that the demo trains on

STEPS = 20


def run(build, device, text, folder):
    report = Path(folder) / f"{device}.json"
    command = [str(Path(build) / "bin" / "moe_trainer"), "--device", device, "--steps", str(STEPS), "--seed", "1",
               "--no-progress", "--json", str(report), "--recompute", "none", "--swapcore", "off", "--data", *text]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"device_parity: {device}: {done.stderr.strip()}")
    return json.loads(report.read_text())


def row(case, metric, value, unit):
    print(json.dumps({"bench": "device_parity", "case": case, "system": "terrace", "metric": metric, "value": value,
                      "unit": unit, "floor": None}), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", required=True)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    text = [str(path) for path in training_runs.text_files()]
    with tempfile.TemporaryDirectory() as folder:
        emulated = run(options.build, "emulated", text, folder)
        other = run(options.build, options.device, text, folder)
    pairs = list(zip(emulated["losses"], other["losses"]))
    row("fp32", "loss_difference_max", max(abs(a - b) for a, b in pairs), "nats")
    row("emulated", "ms_per_step", emulated["ms_per_step"], "ms")
    row(options.device, "ms_per_step", other["ms_per_step"], "ms")


if __name__ == "__main__":
    main()
