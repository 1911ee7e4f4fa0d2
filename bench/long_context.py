#!/usr/bin/env python3
"""One long sequence a step through preset `small`: time, tokens a second and memory, step by step.

  kept/LENGTH       outputs are cached by Swap Core where there is room
  offloaded/LENGTH  what layers save goes to DDR beyond a checkpoint budget, too

The first length runs both ways for two steps, and the bench fails where their losses differ by a bit. It also fails
where a case does not end, or where memory grows: from the first step that runs by a plan on, the peak of live bytes of a
step may not exceed that step's by more than 1%.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))
from training_runs import (RunError, bench_parser, last_lines, log_text, losses_equal, mib,  # noqa: E402
                           outcome_of, run_logged, settled, text_files)

SEED = 7
FIRST_PLANNED = 3  # steps before it are measured
GROWTH = 1.01
DDR = {"small": "48GiB", "tiny": "1GiB"}
SAVED_PER_TOKEN = {"small": 4096, "tiny": 16}  # bytes in HBM, where what layers save is offloaded


@dataclass
class Case:
    length: int
    offloaded: bool
    steps: int

    @property
    def name(self):
        return f"{'offloaded' if self.offloaded else 'kept'}/{self.length}"


CASES = {
    "small": [Case(131072, False, 2), Case(131072, True, 2), Case(262144, False, 20), Case(1048576, True, 3)],
    "tiny": [Case(512, False, 2), Case(512, True, 2), Case(1024, False, 6), Case(4096, True, 3)],
}


def note(text):
    print(f"long_context: {text}", file=sys.stderr, flush=True)


def peaks_of(result):
    """Live bytes at their peak in each step that runs by a plan; empty: there are none."""
    return [step["hbm_live_peak_bytes"] for step in result["by_step"][FIRST_PLANNED:]]


def growth_of(result):
    peaks = peaks_of(result)
    return max(peaks) / peaks[0] if peaks else None


def rows_of(result):
    """(metric, value, unit) of one case."""
    yield "ms_per_step", result["ms_per_step"], "ms"
    yield "tokens_per_second", result["tokens_per_second"], "tokens/s"
    yield "hbm_peak_bytes", result["hbm_peak_bytes"], "bytes"
    yield "ddr_peak_bytes", result["ddr_peak_bytes"], "bytes"
    yield "stall_ms", result["stall_seconds"] * 1e3 / len(result["losses"]), "ms"
    if growth_of(result) is not None:
        yield "hbm_growth_ratio", growth_of(result), "ratio"


class Bench:
    def __init__(self, options):
        self.options = options
        self.out = options.out.resolve()
        self.out.mkdir(parents=True, exist_ok=True)
        self.trainer = options.build.resolve() / "bin" / "moe_trainer"
        if not self.trainer.is_file():
            raise RunError(f"{self.trainer} is not there; ./dev bench long_context builds it")
        self.text = options.data or text_files()
        self.results = {}
        self.wrongs = []

    def policy_of(self, case):
        text = f'version = 1\n[ddr]\nbudget = "{DDR[self.options.preset]}"\n'
        if case.offloaded:
            saved = SAVED_PER_TOKEN[self.options.preset] * case.length
            text += f'[checkpoint]\nbudget = "{saved >> 10}KiB"\ncontingency = "offload"\n'
        path = self.out / f"{case.name.replace('/', '-')}.toml"
        path.write_text(text, encoding="utf-8")
        return path

    def steps_of(self, case):
        return min(case.steps, self.options.steps or case.steps)

    def take(self, case):
        name = case.name.replace("/", "-")
        result, log = self.out / f"{name}.json", self.out / f"{name}.log"
        result.unlink(missing_ok=True)
        command = [str(self.trainer), "--config", str(ROOT / f"examples/moe_trainer/configs/{self.options.preset}.toml"),
                   "--data", *map(str, self.text), "--device", self.options.device, "--seed", str(SEED), "--hbm", "90%",
                   "--batch", "1", "--length", str(case.length), "--steps", str(self.steps_of(case)), "--recompute", "full",
                   "--swapcore", "auto", "--policy", str(self.policy_of(case)), "--json", str(result)]
        with open(log, "wb") as output:
            code = run_logged(command, output)
        if code != 0 or not result.exists():
            raise RunError(f"{case.name}: exit code {code}\n{last_lines(log_text(log))}")
        return json.loads(result.read_text(encoding="utf-8"))

    def check(self, case, result):
        if len(result["losses"]) != self.steps_of(case):
            self.wrongs.append(f"{case.name}: {len(result['losses'])} steps of {self.steps_of(case)}")
        if case.offloaded and result["spilled_bytes"] == 0:
            self.wrongs.append(f"{case.name}: nothing went to DDR")
        growth = growth_of(result)
        if growth is not None and growth > GROWTH:
            self.wrongs.append(f"{case.name}: live bytes grow by {100 * (growth - 1):.1f}%")

    def run(self):
        for case in CASES[self.options.preset]:
            if self.options.case and case.name not in self.options.case:
                continue
            result = self.results[case.name] = self.take(case)
            self.check(case, result)
            for metric, value, unit in rows_of(result):
                print(json.dumps({"bench": "long_context", "case": case.name, "system": "terrace", "metric": metric,
                                  "value": value, "unit": unit, "floor": None}), flush=True)
            note(f"{case.name}: {result['ms_per_step']:.0f} ms, HBM {mib(result['hbm_peak_bytes'])}, "
                 f"DDR {mib(result['ddr_peak_bytes'])}, losses {result['losses'][0]:.4f} to {result['losses'][-1]:.4f}")
        shortest = CASES[self.options.preset][0].length
        both = [self.results[f"{way}/{shortest}"] for way in ("kept", "offloaded") if f"{way}/{shortest}" in self.results]
        if len(both) == 2 and not losses_equal(both):
            self.wrongs.append(f"{shortest}: losses differ with and without offloading")


def options_of(arguments):
    parser = bench_parser("long_context", __doc__, CASES)
    parser.add_argument("--case", action="append", help="only this one (kept/262144); may be repeated")
    parser.add_argument("--steps", type=int, help="of a case, at most")
    options = parser.parse_args(arguments)
    if options.steps is not None and options.steps < 1:
        parser.error("use --steps 1 or more")
    if options.preset is None:
        options.preset = "tiny" if options.quick else "small"
    names = [case.name for case in CASES[options.preset]]
    for name in options.case or []:
        if name not in names:
            parser.error(f"--case {name}: use one of {', '.join(names)}")
    return settled(options, "long_context")


def main(arguments):
    options = options_of(arguments)

    def run():
        bench = Bench(options)
        bench.run()
        return bench.wrongs

    return outcome_of("long_context", run)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
