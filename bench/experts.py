#!/usr/bin/env python3
"""Experts and optimizer state in DDR, beside the same training step with all of it in HBM. docs/benchmarks.md has the cases.

  experts@T    adapters on a frozen model, T tokens an expert: all experts resident, and a share of their weights
               (--resident) with the rest streamed
  idle         few tokens and many experts: whole layers, those with tokens, and what the store chooses (--resident)
  optimizer    all weights trained: state in HBM and in DDR, with gradient clipping and without

Every pair trains the same model on the same text; the bench fails where their losses differ by a bit or a case does not
end. What the link and the layers take is what Swap Core measures in a run of its own.
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
PROBE_STEPS = 3  # the second is measured
LOADS = ["layer", "router", "auto"]
CLIPS = {"clip": 1.0, "no-clip": 0.0}
TIMES_LARGER = 4  # than the HBM budget are the expert weights of `larger`


@dataclass
class Preset:
    config: str
    steps: int
    loads: list  # (experts, sequences in a micro-batch): how many tokens an expert has follows
    idle: tuple  # (experts, length of the one sequence)
    larger: dict  # [moe] and [model] keys of a model most of whose weights are experts
    larger_length: int
    lora: str = '[lora]\nrank = 16\ntargets = ["kda.q", "dsa.out"]\n'


PRESETS = {
    "tiny": Preset("tiny", steps=4, loads=[(8, 2), (8, 8)], idle=(64, 12),
                   larger={("model", "layers"): 24, ("moe", "experts"): 256}, larger_length=24),
    "nano": Preset("nano", steps=6, loads=[(16, 1), (16, 2), (16, 4)], idle=(128, 16),
                   larger={("model", "layers"): 32, ("moe", "experts"): 64}, larger_length=128),
    "slice": Preset("slice", steps=8,
                    loads=[(128, 1), (64, 1), (32, 1), (16, 1), (16, 2), (16, 3), (16, 5)], idle=(256, 64),
                    larger={("model", "layers"): 32, ("moe", "experts"): 128, ("moe", "shared_width"): 1024},
                    larger_length=4096),
}


def with_keys(text, keys):
    """A configuration with some of its keys set: {("moe", "experts"): 16}."""
    lines, section, left = [], "", dict(keys)

    def finish():
        for (where, key) in [name for name in left if name[0] == section]:
            lines.append(f"{key} = {left.pop((where, key))}")

    for line in text.split("\n"):
        if line.startswith("["):
            finish()
            section = line.strip("[] ")
        key = line.split("=")[0].strip()
        lines.append(f"{key} = {left.pop((section, key))}" if (section, key) in left else line)
    finish()
    for where in dict.fromkeys(name[0] for name in left):
        section = where
        lines.append(f"[{where}]")
        finish()
    return "\n".join(lines) + "\n"


def value_of(text, section, key):
    here = ""
    for line in text.split("\n"):
        if line.startswith("["):
            here = line.strip("[] ")
        elif here == section and line.split("=")[0].strip() == key:
            return int(line.split("=")[1].split("#")[0])
    raise RunError(f"the preset says no {section}.{key}")


@dataclass
class Run:
    case: str
    system: str  # "resident", or "terrace" where something lives in DDR
    config: Path
    policy: str = ""
    result: dict = None

    def per_step(self, key):
        return self.result[key] / len(self.result["losses"])


@dataclass
class Link:
    """Rates, bytes a second, and what the layers of a step take, seconds."""
    h2d: float
    d2h: float
    both: float
    forward: float
    backward: float

    def seconds(self, into, out=0):
        return max(into / self.h2d, out / self.d2h, (into + out) / self.both if self.both else 0)


def link_of(snapshot):
    spans = snapshot["layers"] + [snapshot["head"]]
    return Link(snapshot["h2d_bytes_per_second"], snapshot["d2h_bytes_per_second"], snapshot["both_bytes_per_second"],
                sum(span["forward_seconds"] for span in spans) * snapshot["micro_batches"],
                sum(span["backward_seconds"] for span in spans) * snapshot["micro_batches"])


def note(text):
    print(f"experts: {text}", file=sys.stderr, flush=True)


def print_row(run, metric, value, unit, floor=None):
    print(json.dumps({"bench": "experts", "case": run.case, "system": run.system, "metric": metric, "value": value,
                      "unit": unit, "floor": floor}), flush=True)


class Bench:
    def __init__(self, options):
        self.options = options
        self.preset = PRESETS[options.preset]
        self.steps = options.steps or self.preset.steps
        self.out = options.out.resolve()
        self.out.mkdir(parents=True, exist_ok=True)
        self.trainer = options.build.resolve() / "bin" / "moe_trainer"
        if not self.trainer.is_file():
            raise RunError(f"{self.trainer} is not there; ./dev bench experts builds it")
        self.base = (ROOT / f"examples/moe_trainer/configs/{self.preset.config}.toml").read_text(encoding="utf-8")
        self.text = options.data or text_files()
        self.wrongs = []

    def write(self, name, text):
        path = self.out / name
        path.write_text(text, encoding="utf-8")
        return path

    def take(self, name, config, policy, *more, steps=None):
        result, log = self.out / f"{name}.json", self.out / f"{name}.log"
        result.unlink(missing_ok=True)
        command = [str(self.trainer), "--config", str(config), "--data", *map(str, self.text), "--device",
                   self.options.device, "--seed", str(SEED), "--recompute", "full", "--steps", str(steps or self.steps),
                   "--json", str(result), "--policy", str(self.write(f"{name}.policy.toml", "version = 1\n" + policy)), *more]
        with open(log, "wb") as output:
            code = run_logged(command, output)
        if code != 0 or not result.exists():
            raise RunError(f"{name}: exit code {code}\n{last_lines(log_text(log))}")
        return json.loads(result.read_text(encoding="utf-8"))

    def pair(self, case, config, policy):
        """The same step with all of it in HBM and as the policy says, with what the link and the layers take."""
        snapshot = self.take(f"{case}-link", config, "", "--swapcore", "auto", steps=PROBE_STEPS).get("swapcore_snapshot")
        if snapshot is None:
            raise RunError(f"{case}: no step was measured")
        runs = [Run(case, "resident", config), Run(case, "terrace", config, policy)]
        for run in runs:
            run.result = self.take(f"{case}-{run.system}", config, run.policy, "--swapcore", "off")
            note(f"{case} {run.system}: {run.result['ms_per_step']:.1f} ms, HBM {mib(run.result['hbm_peak_bytes'])}, "
                 f"DDR {mib(run.result['ddr_peak_bytes'])}")
        if not losses_equal([run.result for run in runs]):
            self.wrongs.append(f"{case}: losses differ by where bytes live")
        for run in runs:
            print_row(run, "ms_per_step", run.result["ms_per_step"], "ms")
            print_row(run, "hbm_peak_bytes", run.result["hbm_peak_bytes"], "bytes")
            print_row(run, "ddr_peak_bytes", run.result["ddr_peak_bytes"], "bytes")
        return runs, link_of(snapshot)

    def experts(self):
        curve = []
        for experts, batch in self.preset.loads:
            length, top_k = value_of(self.base, "train", "length"), value_of(self.base, "moe", "top_k")
            tokens = length * batch * top_k // experts
            if self.options.tokens_per_expert and tokens not in self.options.tokens_per_expert:
                continue
            config = self.write(f"experts-{tokens}.toml", with_keys(self.base + "\n" + self.preset.lora, {
                ("moe", "experts"): experts, ("train", "batch"): batch, ("train", "micro_batches"): 1}))
            (resident, ours), link = self.pair(f"experts@{tokens}", config,
                                               f'[experts]\nresident = "{self.options.resident}"\n'
                                               f'load = "{self.options.load}"\n')
            fetched = ours.per_step("experts_fetched_bytes")
            seconds = link.seconds(fetched)
            print_row(ours, "fetched_bytes", fetched, "bytes")
            print_row(ours, "stall_ms", ours.per_step("expert_stall_seconds") * 1e3, "ms")
            print_row(ours, "link_share", seconds * 1e3 / resident.result["ms_per_step"], "ratio")
            # What it would be if nothing but the link's rate held anybody up.
            floor = max(1.0, seconds * 1e3 / resident.result["ms_per_step"])
            print_row(ours, "step_time_ratio_to_resident",
                      ours.result["ms_per_step"] / resident.result["ms_per_step"], "ratio", floor)
            self.print_loading(ours)
            curve.append((tokens, seconds * 1e3 / resident.result["ms_per_step"], ours))
        self.break_even(curve)

    def idle(self):
        """Every way of loading on one model, most of whose experts have no tokens."""
        experts, length = self.preset.idle
        config = self.write("idle.toml", with_keys(self.base + "\n" + self.preset.lora, {
            ("moe", "experts"): experts, ("train", "batch"): 1, ("train", "length"): length, ("train", "micro_batches"): 1}))
        runs = [Run("idle", "resident", config)]
        for load in LOADS:
            system = "terrace" if load == "auto" else f"by-{load}"
            runs.append(Run("idle", system, config, f'[experts]\nresident = "{self.options.resident}"\nload = "{load}"\n'))
        for run in runs:
            run.result = self.take(f"idle-{run.system}", config, run.policy, "--swapcore", "off")
            note(f"idle {run.system}: {run.result['ms_per_step']:.1f} ms, HBM {mib(run.result['hbm_peak_bytes'])}")
            print_row(run, "ms_per_step", run.result["ms_per_step"], "ms")
            print_row(run, "hbm_peak_bytes", run.result["hbm_peak_bytes"], "bytes")
            if run.policy:
                print_row(run, "fetched_bytes", run.per_step("experts_fetched_bytes"), "bytes")
                self.print_loading(run)
        if not losses_equal([run.result for run in runs]):
            self.wrongs.append("idle: losses differ by how experts come")

    def larger(self):
        """Adapters on a frozen model that is four times as large as the HBM it may use, every expert in DDR."""
        config = self.write("larger.toml", with_keys(self.base + "\n" + self.preset.lora, {
            **self.preset.larger, ("train", "batch"): 1, ("train", "length"): self.preset.larger_length,
            ("train", "micro_batches"): 1}))
        text = config.read_text(encoding="utf-8")
        number = 2 if 'compute = "bf16"' in text else 4
        weights = 3 * number  # gate, up and down
        for section, key in (("model", "layers"), ("moe", "experts"), ("moe", "latent"), ("moe", "expert_width")):
            weights *= value_of(text, section, key)
        budget = weights // TIMES_LARGER
        runs = [Run("larger", "resident", config),
                Run("larger", "terrace", config, f'[hbm]\nbudget = "{budget >> 10}KiB"\nreserve = "0"\n'
                                                 '[experts]\nresident = "0%"\n')]
        for run in runs:
            run.result = self.take(f"larger-{run.system}", config, run.policy, "--swapcore", "off")
            note(f"larger {run.system}: {run.result['ms_per_step']:.1f} ms, HBM {mib(run.result['hbm_peak_bytes'])}, "
                 f"DDR {mib(run.result['ddr_peak_bytes'])}")
            print_row(run, "ms_per_step", run.result["ms_per_step"], "ms")
            print_row(run, "hbm_peak_bytes", run.result["hbm_peak_bytes"], "bytes", None if run.policy == "" else budget)
        ours = runs[1]
        print_row(ours, "weights_to_budget", ours.result["experts_ddr_bytes"] / budget, "ratio")
        print_row(ours, "fetched_bytes", ours.per_step("experts_fetched_bytes"), "bytes")
        if not losses_equal([run.result for run in runs]):
            self.wrongs.append("larger: losses differ by where experts live")
        if ours.result["hbm_peak_bytes"] > budget:
            self.wrongs.append(f"larger: {mib(ours.result['hbm_peak_bytes'])} of HBM, above the budget of {mib(budget)}")
        if ours.result["experts_ddr_bytes"] < TIMES_LARGER * budget:
            self.wrongs.append("larger: the experts in DDR are not four times the budget")

    def print_loading(self, ours):
        """By whose word experts came at the end, and what the choice was made by."""
        result = ours.result
        if "experts_load" not in result:
            return
        print_row(ours, "by_router", int(result["experts_load"] == "router"), "bool")
        print_row(ours, "fired_share", result["experts_fired_share"], "ratio")
        print_row(ours, "break_even_share", result["experts_break_even_share"], "ratio")
        print_row(ours, "router_stall_ms", ours.per_step("router_stall_seconds") * 1e3, "ms")

    def break_even(self, curve):
        """Tokens an expert at which a step takes as long as its experts do on the link: between two measured loads."""
        for (few, high, _), (many, low, run) in zip(curve, curve[1:]):
            if high >= 1 > low:
                run = Run("experts", "terrace", run.config)
                print_row(run, "break_even_tokens_per_expert", few + (many - few) * (high - 1) / (high - low), "tokens")

    def optimizer(self):
        for name, clip in CLIPS.items():
            config = self.write(f"optimizer-{name}.toml", with_keys(self.base, {("train", "clip_norm"): clip}))
            (resident, ours), link = self.pair(f"optimizer-{name}", config, '[optimizer]\ntier = "ddr"\n')
            into, out = ours.per_step("state_fetched_bytes"), ours.per_step("state_written_bytes")
            added = ours.result["ms_per_step"] - resident.result["ms_per_step"]
            # With clipping no gradient is known to be final before backward ends.
            beside = link.forward + (link.backward if clip == 0 else 0)
            floor = max(0.0, link.seconds(into, out) - beside) * 1e3
            print_row(ours, "fetched_bytes", into, "bytes")
            print_row(ours, "written_bytes", out, "bytes")
            print_row(ours, "link_ms", link.seconds(into, out) * 1e3, "ms")
            print_row(ours, "stall_ms", ours.per_step("optimizer_stall_seconds") * 1e3, "ms")
            print_row(ours, "added_ms", added, "ms", floor)
            if floor > 0:
                print_row(ours, "added_ratio_to_floor", added / floor, "ratio", 1.0)

    def run(self):
        if self.options.part in ("all", "experts"):
            self.experts()
        if self.options.part in ("all", "idle"):
            self.idle()
        if self.options.part in ("all", "larger"):
            self.larger()
        if self.options.part in ("all", "optimizer"):
            self.optimizer()


def options_of(arguments):
    parser = bench_parser("experts", __doc__, PRESETS)
    parser.add_argument("--part", choices=["all", "experts", "idle", "larger", "optimizer"], default="all")
    parser.add_argument("--tokens-per-expert", type=int, action="append", help="only this load; may be repeated")
    parser.add_argument("--resident", default="25%", help="of the expert weights (default: 25%%)")
    parser.add_argument("--load", choices=LOADS, default="auto", help="experts.load of experts@T (default: auto)")
    parser.add_argument("--steps", type=int, help="of a run; the first two are not timed")
    options = parser.parse_args(arguments)
    if options.steps is not None and options.steps < 3:
        parser.error("use --steps 3 or more")
    return settled(options, "experts")


def main(arguments):
    options = options_of(arguments)

    def run():
        bench = Bench(options)
        bench.run()
        return bench.wrongs

    return outcome_of("experts", run)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
