#!/usr/bin/env python3
"""What Terrace does for a training step, together and one by one: bits, bytes moved, HBM and time in one table.

  trained      all weights are trained
  accumulated  the same in twice as many micro-batches
  lora         adapters on a frozen model

Of each, `plain` keeps everything in HBM and recomputes its layers; the others do the same step with outputs cached by
Swap Core inside a budget (a quarter of the way from plain's peak to that of no recomputation), with experts, and with
optimizer state and gradients of experts, in DDR. Trained experts leave HBM together with their state. The loss is
computed in chunks in every row: logits never exist whole. The bench fails where losses differ from plain's by a bit, a
peak is above its budget, or a case does not end.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "bench"))
sys.path.insert(0, str(ROOT / "examples"))
from experts import PRESETS as EXPERT_PRESETS, value_of, with_keys  # noqa: E402
from training_runs import (RunError, bench_parser, last_lines, log_text, losses_equal, mib,  # noqa: E402
                           outcome_of, run_logged, settled, text_files)

SEED = 7
SHARE = 25  # of the way from plain's peak to that of no recomputation, in percent
POLICIES = {"experts": '[experts]\nresident = "25%"\n', "optimizer": '[optimizer]\ntier = "ddr"\ngradients = "ddr"\n'}
MOVED = ("spilled_bytes", "restored_bytes", "experts_fetched_bytes", "state_fetched_bytes", "state_written_bytes")

WITH_STATE = [["optimizer"], ["swapcore", "optimizer"], ["experts", "optimizer"], ["swapcore", "experts", "optimizer"]]
SETTINGS = {
    "trained": [["swapcore"], *WITH_STATE],
    "accumulated": [["swapcore"], *WITH_STATE],
    "lora": [["swapcore"], ["experts"], ["swapcore", "experts"], *WITH_STATE],
}
STEPS = {"tiny": 6, "nano": 8, "slice": 8}


@dataclass
class Row:
    setting: str
    parts: list  # what is on; none: plain
    result: dict
    same_bits: bool = True
    budget: int = 0

    @property
    def case(self):
        return f"{self.setting}/{'+'.join(self.parts) or 'plain'}"

    @property
    def system(self):
        return "terrace" if self.parts else "plain"

    def moved_bytes(self):
        """A step, in both directions."""
        return sum(self.result.get(key, 0) for key in MOVED) / len(self.result["losses"])

    def wrong(self):
        if not self.same_bits:
            return f"{self.case}: losses are not those of plain, bit for bit"
        if self.budget and self.result["hbm_peak_bytes"] > self.budget:
            return f"{self.case}: peak {self.result['hbm_peak_bytes']} is above the budget of {self.budget} bytes"
        return None


def rows_of(row, plain):
    """(metric, value, unit) of one line of the table."""
    yield "ms_per_step", row.result["ms_per_step"], "ms"
    yield "step_time_ratio_to_plain", row.result["ms_per_step"] / plain.result["ms_per_step"], "ratio"
    yield "moved_bytes", row.moved_bytes(), "bytes"
    yield "hbm_peak_bytes", row.result["hbm_peak_bytes"], "bytes"
    yield "ddr_peak_bytes", row.result["ddr_peak_bytes"], "bytes"
    yield "stall_ms", row.result["stall_seconds"] * 1e3 / len(row.result["losses"]), "ms"
    yield "bits_equal", int(row.same_bits), "bool"


def text_table(rows):
    lines = [("case", "ms", "to plain", "moved a step", "HBM peak", "DDR peak", "bits")]
    plains = {row.setting: row for row in rows if not row.parts}
    for row in rows:
        ratio = row.result["ms_per_step"] / plains[row.setting].result["ms_per_step"]
        lines.append((row.case, f"{row.result['ms_per_step']:.1f}", f"{ratio:.3f}", mib(row.moved_bytes()),
                      mib(row.result["hbm_peak_bytes"]), mib(row.result["ddr_peak_bytes"]),
                      "equal" if row.same_bits else "DIFFER"))
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join("  ".join(cell.ljust(width) if i == 0 else cell.rjust(width)
                               for i, (cell, width) in enumerate(zip(line, widths))) for line in lines)


class Bench:
    def __init__(self, options):
        self.options = options
        self.steps = options.steps or STEPS[options.preset]
        self.out = options.out.resolve()
        self.out.mkdir(parents=True, exist_ok=True)
        self.trainer = options.build.resolve() / "bin" / "moe_trainer"
        if not self.trainer.is_file():
            raise RunError(f"{self.trainer} is not there; ./dev bench combinations builds it")
        self.text = options.data or text_files()
        self.rows = []

    def config_of(self, setting):
        base = (ROOT / f"examples/moe_trainer/configs/{self.options.preset}.toml").read_text(encoding="utf-8")
        if setting == "lora":
            base += "\n" + EXPERT_PRESETS[self.options.preset].lora
        if setting == "accumulated":
            base = with_keys(base, {("train", "micro_batches"): 2 * value_of(base, "train", "micro_batches")})
        path = self.out / f"{setting}.toml"
        path.write_text(base, encoding="utf-8")
        return path

    def take(self, name, config, parts, budget=0, recompute="full"):
        result, log = self.out / f"{name}.json", self.out / f"{name}.log"
        policy = self.out / f"{name}.policy.toml"
        policy.write_text("version = 1\n" + "".join(POLICIES.get(part, "") for part in parts), encoding="utf-8")
        result.unlink(missing_ok=True)
        command = [str(self.trainer), "--config", str(config), "--data", *map(str, self.text), "--device",
                   self.options.device, "--seed", str(SEED), "--recompute", recompute, "--steps", str(self.steps), "--json",
                   str(result), "--policy", str(policy), "--swapcore", "auto" if "swapcore" in parts else "off"]
        if budget:
            command += ["--hbm", str(budget)]
        with open(log, "wb") as output:
            code = run_logged(command, output)
        if code != 0 or not result.exists():
            raise RunError(f"{name}: exit code {code}\n{last_lines(log_text(log))}")
        return json.loads(result.read_text(encoding="utf-8"))

    def run_setting(self, setting):
        config = self.config_of(setting)
        none = self.take(f"{setting}-none", config, [], recompute="none")
        plain = Row(setting, [], self.take(f"{setting}-plain", config, []))
        low, high = plain.result["hbm_peak_bytes"], none["hbm_peak_bytes"]
        budget = low + max(0, high - low) * SHARE // 100
        self.rows.append(plain)
        for parts in SETTINGS[setting]:
            row = Row(setting, parts, {}, budget=budget if "swapcore" in parts else 0)
            row.result = self.take(row.case.replace("/", "-"), config, parts, row.budget)
            row.same_bits = losses_equal([plain.result, row.result])
            self.rows.append(row)
        for row in self.rows:
            if row.setting != setting:
                continue
            for metric, value, unit in rows_of(row, plain):
                print(json.dumps({"bench": "combinations", "case": row.case, "system": row.system, "metric": metric,
                                  "value": value, "unit": unit, "floor": None}), flush=True)

    def run(self):
        for setting in self.options.setting or SETTINGS:
            self.run_setting(setting)


def options_of(arguments):
    parser = bench_parser("combinations", __doc__, STEPS)
    parser.add_argument("--setting", action="append", choices=sorted(SETTINGS), help="only this one; may be repeated")
    parser.add_argument("--steps", type=int, help="of a run; the first two are not timed")
    options = parser.parse_args(arguments)
    if options.steps is not None and options.steps < 3:
        parser.error("use --steps 3 or more")
    return settled(options, "combinations")


def main(arguments):
    options = options_of(arguments)

    def run():
        bench = Bench(options)
        bench.run()
        print(text_table(bench.rows), file=sys.stderr)
        return [row.wrong() for row in bench.rows if row.wrong()]

    return outcome_of("combinations", run)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
