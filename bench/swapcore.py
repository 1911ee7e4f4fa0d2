#!/usr/bin/env python3
"""A training step at several HBM budgets: Swap Core beside no and full recomputation, and beside what else one could do
inside a budget. docs/benchmarks.md has the cases.

All cases are the trainer under one runtime and differ in what is kept where; that the rivals need no code of their own
is no favour to us:
  offload-all  the rule `* -> ddr`: every output leaves when it is there, the layer before prefetches, late ones are
               waited for
  lru          the rule `* -> hbm`: where HBM is full the session drops the output whose next use is farthest. An output
               is used once, in the reverse of the order in which it came: that one is the least recently used
  selective    a rule `-> hbm` for each operator of the best set that fits, whole in every layer

The bench fails where losses differ by a bit, a peak is above its budget, or a case does not end.
"""

import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))
from training_runs import (RunError, bench_parser, last_lines, log_text, losses_equal, merged, mib,  # noqa: E402
                           only_the_command_line_counts, run_logged, settled, text_files)

SHARES = (0, 10, 25, 50, 75)  # of the way from full's peak to none's, in percent
RIVALS = ("offload-all", "lru", "selective")
RULE_FOR_ALL = {"offload-all": "ddr", "lru": "hbm"}
MEASURING_STEPS = 2  # in which the plan is not there yet
SEED = 7


@dataclass
class Preset:
    config: str
    steps: int  # of a turn
    resumes: bool  # turns go on from checkpoints; else each begins anew: a checkpoint of slice is some 50 GB
    more: list = field(default_factory=list)


PRESETS = {
    "tiny": Preset("tiny", steps=6, resumes=True, more=["--length", "384", "--batch", "8"]),
    "nano": Preset("nano", steps=8, resumes=True),
    "slice": Preset("slice", steps=14, resumes=False, more=["--batch", "2"]),  # a step of half a second
}


@dataclass
class Case:
    name: str
    system: str
    recompute: str = "full"
    swapcore: str = ""  # empty: as the policy says
    share: int = -1  # of the budget; negative: no budget
    policy: Path = None
    budget: int = 0
    turns: list = field(default_factory=list)
    failure: str = ""

    @property
    def plans(self):
        return self.swapcore == "auto"

    @property
    def result(self):
        return merged(self.turns)

    def stall_ms(self):
        """A step, of those in which outputs are kept at all."""
        steps = sum(len(turn["losses"]) - (MEASURING_STEPS if self.plans else 0) for turn in self.turns)
        return self.result["stall_seconds"] * 1e3 / steps if steps > 0 else None

    def link_window_used(self):
        """By direction, of the last turn; empty without a plan: what goes without one has no windows."""
        shares = self.turns[-1].get("link_window_used") if self.plans else None
        return {direction: share for direction, share in (shares or {}).items() if share is not None}


def all_cases(rivals_at):
    cases = [Case("none", "no-recomputation", recompute="none", swapcore="off"),
             Case("full", "full-recomputation", swapcore="off")]
    cases += [Case(f"swapcore@{share}", "terrace", swapcore="auto", share=share) for share in SHARES]
    return cases + [Case(name, name, share=rivals_at) for name in RIVALS]


# ---------------------------------------------------------------- selective recomputation


@dataclass
class Operator:
    """An operator in every layer that has it: kept whole or not at all."""
    group: str
    seconds: float = 0
    bytes_by_layer: dict = field(default_factory=dict)

    @property
    def bytes(self):
        return sum(self.bytes_by_layer.values())


def operators_of(snapshot):
    by_group = {}
    for site in snapshot["sites"]:
        if site["bytes"] == 0 or site["recompute_seconds"] <= 0:
            continue
        operator = by_group.setdefault(site["group"], Operator(site["group"]))
        operator.seconds += site["recompute_seconds"]
        operator.bytes_by_layer[site["layer"]] = operator.bytes_by_layer.get(site["layer"], 0) + site["bytes"]
    return sorted(by_group.values(), key=lambda one: one.seconds / one.bytes, reverse=True)


def room_by_moment(snapshot):
    """(first layer that holds nothing yet, bytes free for kept outputs) of each forward, the head and each backward."""
    layers, head, budget = snapshot["layers"], snapshot["head"], snapshot["hbm_budget"]
    forward = [(l + 1, budget - layer["forward_peak"]) for l, layer in enumerate(layers)]
    middle = [(len(layers), budget - max(head["forward_peak"], head["backward_peak"]))]
    return forward + middle + [(l, budget - layer["backward_peak"]) for l, layer in enumerate(layers)]


def best_whole_set(snapshot):
    """The operators whose outputs, kept in every layer, save most time inside the budget: exact, by branch and bound."""
    operators = operators_of(snapshot)
    moments = room_by_moment(snapshot)
    needs = [[sum(size for layer, size in one.bytes_by_layer.items() if layer < end) for end, _ in moments]
             for one in operators]
    head = len(snapshot["layers"])  # where everything is held at once
    best = [0.0, []]

    def at_most(first, room):
        """More than this the rest cannot save: parts of an operator count too."""
        seconds = 0.0
        for one in operators[first:]:
            if one.bytes > room:
                return seconds + one.seconds * max(0, room) / one.bytes
            room -= one.bytes
            seconds += one.seconds
        return seconds

    def visit(index, seconds, chosen, rooms):
        if seconds > best[0]:
            best[:] = [seconds, list(chosen)]
        if index == len(operators) or seconds + at_most(index, rooms[head]) <= best[0] * (1 + 1e-9):
            return
        left = [room - need for room, need in zip(rooms, needs[index])]
        # A moment at which nothing of it is held does not limit it.
        if all(room >= 0 or need == 0 for room, need in zip(left, needs[index])):
            visit(index + 1, seconds + operators[index].seconds, [*chosen, operators[index].group], left)
        visit(index + 1, seconds, chosen, rooms)

    visit(0, 0.0, [], [room for _, room in moments])
    return best[1]


# ---------------------------------------------------------------- the bench


def note(text):
    print(f"swapcore: {text}", file=sys.stderr, flush=True)


class Bench:
    def __init__(self, options):
        self.options = options
        self.preset = PRESETS[options.preset]
        self.steps = options.steps or self.preset.steps
        self.out = options.out.resolve()
        self.out.mkdir(parents=True, exist_ok=True)
        places = [options.build.resolve() / "bin" / "moe_trainer", options.build.resolve() / "moe_trainer"]
        self.trainer = next((place for place in places if place.is_file()), None)
        if self.trainer is None:
            raise RunError(f"{places[0]} is not there; ./dev bench swapcore builds it")
        self.text = options.data or text_files()
        self.cases = self._chosen(all_cases(options.rivals_at))
        self.by_name = {case.name: case for case in self.cases}
        self.interrupted = False

    def _chosen(self, cases):
        names = set(self.options.case or [case.name for case in cases])
        unknown = names - {case.name for case in cases}
        if unknown:
            raise RunError(f"no case {', '.join(sorted(unknown))}; there are: {', '.join(case.name for case in cases)}")
        names |= {"none", "full"}  # the budgets lie between their peaks
        if "selective" in names:
            names.add(f"swapcore@{self.options.rivals_at}")  # what it is chosen by is measured there
        return [case for case in cases if case.name in names]

    def write_policy(self, case, rules):
        case.policy = self.out / f"{case.name}.toml"
        lines = ["version = 1", "[swapcore]", 'mode = "rules"']
        for match, action in rules:
            lines += ["[[swapcore.rule]]", f'match = "{match}"', f'action = "{action}"']
        case.policy.write_text("\n".join(lines) + "\n", encoding="utf-8")

    def prepare(self, case):
        """What is known only when others have had their first turn: the budget, and what selective keeps."""
        if case.share >= 0 and not case.budget:
            low, high = (self.by_name[name].turns[0]["hbm_peak_bytes"] for name in ("full", "none"))
            if low >= high:
                raise RunError(f"recomputation saves no memory here: peak {mib(high)} without, {mib(low)} with")
            case.budget = low + (high - low) * case.share // 100
        if case.name in RULE_FOR_ALL:
            self.write_policy(case, [("*", RULE_FOR_ALL[case.name])])
        elif case.name == "selective" and not case.policy:
            measured = self.by_name[f"swapcore@{case.share}"]
            snapshot = measured.turns[0].get("swapcore_snapshot") if measured.turns else None
            if snapshot is None:
                raise RunError(f"{measured.name} measured no step, and selective is chosen by that")
            groups = best_whole_set(snapshot)
            note(f"selective keeps {', '.join(groups) or 'nothing'}")
            self.write_policy(case, [(f"layer.*.{group}", "hbm") for group in groups] or [("*", "discard")])

    def command(self, case, turn):
        command = [str(self.trainer), "--config", str(ROOT / f"examples/moe_trainer/configs/{self.preset.config}.toml"),
                   "--data", *map(str, self.text), "--device", self.options.device, "--seed", str(SEED),
                   "--recompute", case.recompute, "--json", str(self.out / f"{case.name}.json"), *self.preset.more]
        if case.swapcore:
            command += ["--swapcore", case.swapcore]
        if case.policy:
            command += ["--policy", str(case.policy)]
        if case.budget:
            command += ["--hbm", str(case.budget)]
        if not self.preset.resumes:
            return command + ["--steps", str(self.steps)]
        checkpoint = self.out / f"{case.name}.safetensors"
        command += ["--steps", str(self.steps * (turn + 1))]
        if turn + 1 < self.options.turns:
            command += ["--checkpoint", str(checkpoint)]
        return command + (["--resume", str(checkpoint)] if turn else [])

    def take_turn(self, case, turn):
        result, log = self.out / f"{case.name}.json", self.out / f"{case.name}.log"
        result.unlink(missing_ok=True)
        started = time.monotonic()
        try:
            self.prepare(case)
        except RunError as error:
            case.failure = str(error)
            return
        with open(log, "ab" if turn else "wb") as output:
            code = run_logged(self.command(case, turn), output)
        if code != 0 or not result.exists():
            case.failure = f"exit code {code}\n{last_lines(log_text(log))}"
            return
        case.turns.append(json.loads(result.read_text(encoding="utf-8")))
        last = case.turns[-1]
        note(f"{case.name} turn {turn + 1}: {last['ms_per_step']:.1f} ms, HBM {mib(last['hbm_peak_bytes'])} of "
             f"{mib(case.budget or None)}, DDR {mib(last['ddr_peak_bytes'])}, hits {last['cache_hits']}, misses {last['cache_misses']}, "
             f"late {last['cache_late']}, evictions {last['cache_evictions']}; {time.monotonic() - started:.0f} s")

    def run(self):
        """What is interrupted keeps the turns that it had."""
        try:
            self.take_turns()
        except KeyboardInterrupt:
            self.interrupted = True
            for case in self.cases:
                case.failure = case.failure or ("" if case.turns else "interrupted before it had a turn")
        for case in self.cases:
            (self.out / f"{case.name}.safetensors").unlink(missing_ok=True)

    def take_turns(self):
        for turn in range(self.options.turns):
            for case in self.cases:
                if not case.failure:
                    self.take_turn(case, turn)
                if case.failure and case.name in ("none", "full"):
                    raise RunError(f"{case.name}: {case.failure}")

    def wrongs(self):
        whole = [case for case in self.cases if not case.failure]
        for case in self.cases:
            if case.failure:
                yield f"{case.name}: {case.failure}"
            elif case.budget and case.result["hbm_peak_bytes"] > case.budget:
                yield f"{case.name}: peak {case.result['hbm_peak_bytes']} is above the budget of {case.budget} bytes"
        for case in whole:
            for turn, result in enumerate(case.turns):
                first = whole[0].turns[turn if self.preset.resumes else 0]
                if not losses_equal([first, result]):
                    yield f"{case.name}: its losses of turn {turn + 1} are not those of {whole[0].name}, bit for bit"


# ---------------------------------------------------------------- rows


def print_row(case, metric, value, unit, floor=None):
    print(json.dumps({"bench": "swapcore", "case": case.name, "system": case.system, "metric": metric, "value": value,
                      "unit": unit, "floor": floor}), flush=True)


def program_of_the_bound():
    try:
        from swapcore_bound import bound
        return bound
    except SystemExit as problem:
        note(f"no bound: {problem}")
        return None


def bound_ms(case, bound):
    """What no placement at the case's budget can beat; null without scipy, or where no step was measured."""
    snapshot = case.turns[0].get("swapcore_snapshot")
    return bound(snapshot, case.budget) * 1e3 if bound and snapshot and case.plans else None


def print_rows(bench):
    bound = program_of_the_bound()
    ms = {case.name: case.result["ms_per_step"] for case in bench.cases if not case.failure}
    for case in bench.cases:
        if case.failure:
            continue
        result = case.result
        print_row(case, "ms_per_step", ms[case.name], "ms", bound_ms(case, bound))
        print_row(case, "hbm_peak_bytes", result["hbm_peak_bytes"], "bytes")
        print_row(case, "ddr_peak_bytes", result["ddr_peak_bytes"], "bytes")
        print_row(case, "stall_ms", case.stall_ms(), "ms")
        # Measured, of the direction that is used more, and of each; what the plan expected beside it.
        used = case.link_window_used()
        print_row(case, "link_window_used", max(used.values(), default=None), "ratio")
        for direction in ("d2h", "h2d"):
            print_row(case, f"link_window_used_{direction}", used.get(direction), "ratio")
        print_row(case, "link_window_planned", result.get("predicted_link_window_used") if case.plans else None, "ratio")
        if case.budget:
            print_row(case, "hbm_budget_bytes", case.budget, "bytes")
        for other in ("none", "full"):
            print_row(case, f"step_time_ratio_to_{other}", ms[case.name] / ms[other] if other in ms else None, "ratio")
    ours = bench.by_name.get(f"swapcore@{bench.options.rivals_at}")
    for name in RIVALS:
        if ours and ours.name in ms and name in ms:
            print_row(ours, f"step_time_ratio_to_{name}", ms[ours.name] / ms[name], "ratio")


def options_of(arguments):
    parser = bench_parser("swapcore", __doc__, PRESETS)
    parser.add_argument("--case", action="append", help="only this one, and none and full; may be repeated")
    parser.add_argument("--steps", type=int, help="of a turn; the first two are not timed")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--rivals-at", type=int, default=50, choices=SHARES, metavar="SHARE",
                        help="the budget of offload-all, lru and selective, as swapcore@SHARE has it (default: 50)")
    options = parser.parse_args(arguments)
    if options.turns < 1 or (options.steps is not None and options.steps <= MEASURING_STEPS):
        parser.error(f"use --turns 1 or more, and --steps {MEASURING_STEPS + 1} or more")
    return settled(options, "swapcore")


def main(arguments):
    options = options_of(arguments)
    only_the_command_line_counts()
    bench = None
    try:
        bench = Bench(options)
        bench.run()
        print_rows(bench)
        wrongs = list(bench.wrongs())
    except RunError as error:
        wrongs = [str(error)]
    for wrong in wrongs:
        note(wrong)
    return 130 if bench and bench.interrupted else 1 if wrongs else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
