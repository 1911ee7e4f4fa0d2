#!/usr/bin/env python3
"""One model, one memory budget, four ways to live with it. `./dev demo` builds the programs and runs this.

  fits        no budget, nothing recomputed: what a larger GPU would do
  no-tiering  the budget, nothing recomputed: must end with a message that says what was missing
  recompute   the budget, every activation recomputed: what people do today
  swapcore    the budget, Terrace decides what stays, what moves and what is recomputed

All four use the same seed and data, each under `terrace run`. The three that end take turns of some steps, going on from
their checkpoints: a machine that is faster now than in five minutes is so for all of them. The budget lies between the two peaks that a short
calibration measures. Written to --out: summary.json, metrics.prom (scraped from the daemon while swapcore runs),
and a log and a result a run. Exit code 0 only if everything is as it should be.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

from training_runs import RunError, last_lines, log_text, losses_equal, merged, mib, run_logged, text_files

# Where between the peak of full recomputation (0) and the peak of none (1) the budget lies.
BUDGET_SHARE = 0.6
CALIBRATION_STEPS = 3
TURN_STEPS = 16  # enough that the two in which Swap Core measures don't count
TABLE_BEGIN = "<!-- demo-table -->"
TABLE_END = "<!-- /demo-table -->"
ROOT = Path(__file__).resolve().parent.parent


@dataclass
class Run:
    name: str
    recompute: str
    swapcore: str
    budgeted: bool
    exit_code: int = -1
    turns: list = field(default_factory=list)
    result: dict = field(default_factory=dict)
    log: str = ""


def four_runs():
    return [
        Run("fits", "none", "off", budgeted=False),
        Run("no-tiering", "none", "off", budgeted=True),
        Run("recompute", "full", "off", budgeted=True),
        Run("swapcore", "full", "auto", budgeted=True),
    ]


class Scraper:
    """Reads the daemon's /metrics every half second and keeps the last answer that told of `job`."""

    def __init__(self, terrace, socket, job):
        self._terrace, self._socket, self._job = terrace, socket, job
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self.text = ""
        self.scrapes = 0
        self.trouble = "the daemon never answered"

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()

    def _loop(self):
        listen = None
        while not self._stop.wait(0.5):
            try:
                listen = listen or self._address()
                with urllib.request.urlopen(f"http://{listen}/metrics", timeout=5) as answer:
                    text = answer.read().decode()
                if f'"{self._job}"' in text:
                    self.text = text
                    self.scrapes += 1
                else:
                    self.trouble = f"/metrics never told of the job {self._job}"
            except (OSError, ValueError, KeyError, urllib.error.URLError) as error:
                self.trouble = str(error)
                listen = None

    def _address(self):
        command = [self._terrace, "status", "--json", "--socket", self._socket]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
        if answer.returncode != 0:
            raise ValueError(answer.stderr.strip() or "terrace status failed")
        return json.loads(answer.stdout)["listen"]


class Demo:
    def __init__(self, options):
        self.options = options
        self.out = Path(options.out).resolve()
        self.build = Path(options.build).resolve()
        self.out.mkdir(parents=True, exist_ok=True)
        self.data = text_files()
        self.budget = 0
        self.metrics = None
        self._short_folder = None
        self._write_policy()

    def _write_policy(self):
        """A daemon of our own: its socket in the output folder, its port chosen by the system."""
        self.socket = str(self.out / "terraced.sock")
        if len(self.socket) > 100:  # the system's limit on the path of a socket is 107
            self._short_folder = tempfile.TemporaryDirectory(prefix="terrace-demo-")
            self.socket = str(Path(self._short_folder.name) / "terraced.sock")
        self.policy = self.out / "terrace.toml"
        self.policy.write_text(
            f'version = 1\n[metrics]\nlisten = "127.0.0.1:0"\n[daemon]\nsocket = "{self.socket}"\n', encoding="utf-8")

    def program(self, name):
        path = self.build / "bin" / name
        if not path.exists():
            raise RunError(f"{path} is not there; ./dev demo builds it")
        return str(path)

    def trainer_command(self, run, steps, checkpoint):
        options = self.options
        command = [self.program("moe_trainer"), "--data", *map(str, self.data), "--device", options.device,
                   "--steps", str(steps), "--seed", str(options.seed), "--recompute", run.recompute,
                   "--swapcore", run.swapcore, "--json", str(self.out / f"{run.name}.json")]
        if options.config:
            command += ["--config", options.config]
        if run.budgeted:
            command += ["--hbm", str(self.budget)]
        if checkpoint:
            command += ["--checkpoint", str(checkpoint)]
            if checkpoint.exists():
                command += ["--resume", str(checkpoint)]
        return command

    def execute(self, run, steps, checkpoint=None):
        """Runs one training job under `terrace run` until `steps` are done; its output goes to a log."""
        result = self.out / f"{run.name}.json"
        result.unlink(missing_ok=True)
        command = [self.program("terrace"), "run", "--policy", str(self.policy), "--socket", self.socket,
                   "--listen", "127.0.0.1:0", "--job", run.name, "--", *self.trainer_command(run, steps, checkpoint)]
        note(f"{run.name}: {steps} steps")
        log = self.out / f"{run.name}.log"
        with open(log, "ab" if checkpoint else "wb") as output:
            code = run_logged(command, output)
        run.exit_code = code if code >= 0 else 128 - code
        run.log = log_text(log)
        if result.exists():
            run.turns.append(json.loads(result.read_text(encoding="utf-8")))
            run.result = merged(run.turns)
        return run

    def calibrate(self):
        """Sets the budget from the peaks of two short runs."""
        peaks = {}
        for recompute in ("none", "full"):
            run = self.execute(Run(f"calibration-{recompute}", recompute, "off", budgeted=False), CALIBRATION_STEPS)
            if run.exit_code != 0:
                raise RunError(f"calibration with --recompute {recompute} failed:\n{last_lines(run.log)}")
            peaks[recompute] = run.result["hbm_peak_bytes"]
        if peaks["none"] <= peaks["full"]:
            raise RunError(f"recomputation saves no memory here: {peaks['none']} bytes without, {peaks['full']} with")
        share = self.options.budget_share
        self.budget = int(peaks["full"] + share * (peaks["none"] - peaks["full"]))
        note(f"peak {mib(peaks['none'])} without recomputation, {mib(peaks['full'])} with; budget {mib(self.budget)}")

    def run_all(self):
        self.calibrate()
        runs = four_runs()
        turns = max(1, round(self.options.steps / TURN_STEPS))
        for turn in range(turns):
            for run in runs:
                if turn == 0 or run.exit_code == 0:
                    self.take_turn(run, turn, turns)
        return runs

    def take_turn(self, run, turn, turns):
        checkpoint = self.out / f"{run.name}.safetensors" if turns > 1 else None
        log = self.out / f"{run.name}.log"
        if turn == 0:
            for old in (checkpoint or log, log):
                old.unlink(missing_ok=True)
        steps = self.options.steps * (turn + 1) // turns
        started = time.monotonic()
        if run.name == "swapcore":
            with Scraper(self.program("terrace"), self.socket, run.name) as scraper:
                self.execute(run, steps, checkpoint)
            if scraper.text or not self.metrics:
                self.metrics = scraper
        else:
            self.execute(run, steps, checkpoint)
        note(f"{run.name}: exit code {run.exit_code}, {time.monotonic() - started:.0f} s")
        if checkpoint and turn == turns - 1:
            checkpoint.unlink(missing_ok=True)

    def close(self):
        """Ends the daemon that `terrace run` started for this demo, and only that one."""
        try:
            command = [self.program("terrace"), "status", "--json", "--socket", self.socket]
            answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
            pid = int(json.loads(answer.stdout)["pid"]) if answer.returncode == 0 else 0
            if pid > 1:
                os.kill(pid, signal.SIGTERM)
        except (RunError, OSError, ValueError, KeyError, subprocess.SubprocessError):
            pass  # it ended by itself
        if self._short_folder:
            self._short_folder.cleanup()


def note(text):
    print(f"demo: {text}", file=sys.stderr, flush=True)


def summary_of(demo, runs):
    device = next((run.result["device"] for run in runs if "device" in run.result), demo.options.device)
    kept = ("ms_per_step", "tokens_per_second", "hbm_peak_bytes", "ddr_peak_bytes", "cache_hits", "cache_misses", "cache_late")
    rows = []
    for run in runs:
        losses = run.result.get("losses", [])
        row = {"name": run.name, "exit_code": run.exit_code, "steps": len(losses)}
        row.update({key: run.result.get(key) for key in kept})
        row["losses_hex"] = run.result.get("losses_hex", [])
        row["losses"] = losses
        rows.append(row)
    return {"device": device, "budget_bytes": demo.budget, "runs": rows}


def cells_of(row):
    def number(key, digits):
        return "-" if row[key] is None else f"{row[key]:,.{digits}f}"

    last_loss = f"{row['losses'][-1]:.4f}" if row["losses"] else "-"
    return [row["name"], number("ms_per_step", 1), number("tokens_per_second", 0), mib(row["hbm_peak_bytes"]),
            mib(row["ddr_peak_bytes"]), number("cache_hits", 0), number("cache_misses", 0), number("cache_late", 0), last_loss]


def table_of(summary):
    """The table in Markdown, padded so that a terminal shows it well."""
    head = ["run", "ms/step", "tokens/s", "HBM peak", "DDR peak", "hits", "misses", "late", "last loss"]
    rows = []
    for row in summary["runs"]:
        cells = cells_of(row)
        if row["exit_code"] != 0:
            cells[1:] = ["out of memory" if row["name"] == "no-tiering" else "failed"] + ["-"] * (len(head) - 2)
        rows.append(cells)
    widths = [max(len(line[column]) for line in [head, *rows]) for column in range(len(head))]
    lines = [[cell.ljust(width) if column == 0 else cell.rjust(width) for column, (cell, width) in enumerate(zip(line, widths))]
             for line in [head, *rows]]
    rule = ["-" * widths[0]] + ["-" * (width - 1) + ":" for width in widths[1:]]
    return "\n".join("| " + " | ".join(line) + " |" for line in [lines[0], rule, *lines[1:]])


def bits_equal(runs):
    return losses_equal([run.result for run in runs if run.name != "no-tiering"])


def says_what_was_missing(log):
    text = log.lower()
    return "budget" in text and ("missing" in text or "short" in text) and ("terrace.toml" in text or "policy" in text or "[hbm]" in text)


def verdicts(demo, runs):
    """(true or false, what was checked) a row."""
    by_name = {run.name: run for run in runs}
    refused = by_name["no-tiering"]
    for name in ("fits", "recompute", "swapcore"):
        yield by_name[name].exit_code == 0, f"{name} ends with exit code 0"
    yield refused.exit_code != 0, "no-tiering ends with another"
    yield says_what_was_missing(refused.log), "its message says how much was missing and which policy lines would help"
    yield bits_equal(runs), "the losses of fits, recompute and swapcore are equal, bit for bit"
    for name in ("recompute", "swapcore"):
        peak = by_name[name].result.get("hbm_peak_bytes")
        yield peak is not None and peak <= demo.budget, f"{name} stays within the budget ({mib(peak)} of {mib(demo.budget)})"
    losses = by_name["swapcore"].result.get("losses") or [0]
    fall = 1 - losses[-1] / losses[0] if losses[0] else 0
    yield fall > 0, f"the loss falls ({100 * fall:.0f}% in {len(losses)} steps)"
    scraped = bool(demo.metrics and demo.metrics.text)
    why = f"{demo.metrics.scrapes} scrapes" if scraped else demo.metrics.trouble
    yield scraped, f"metrics were read from the daemon while swapcore ran ({why})"


def report(demo, runs):
    summary = summary_of(demo, runs)
    (demo.out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    (demo.out / "metrics.prom").write_text(demo.metrics.text, encoding="utf-8")
    table = table_of(summary)
    print(f"\ndevice {summary['device']}, budget {mib(summary['budget_bytes'])} of HBM\n\n{table}\n")
    good = True
    for passed, what in verdicts(demo, runs):
        print(("ok    " if passed else "WRONG ") + what)
        good = good and passed
    speeds = {run.name: run.result.get("ms_per_step") for run in runs}
    if speeds["recompute"] and speeds["swapcore"]:
        print(f"swapcore takes {speeds['swapcore'] / speeds['recompute']:.3f} of the time of full recomputation")
    for run in runs:
        if run.exit_code != 0:
            print(f"\n{run.name} said:\n{last_lines(run.log)}")
    return good, table, summary


def update_readme(table, summary):
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    before, begin, rest = text.partition(TABLE_BEGIN)
    _, end, after = rest.partition(TABLE_END)
    if not begin or not end:
        raise RunError(f"README.md has no {TABLE_BEGIN} ... {TABLE_END}")
    caption = f"Device {summary['device']}, budget {mib(summary['budget_bytes'])} of HBM:"
    readme.write_text(f"{before}{begin}\n{caption}\n\n{table}\n{end}{after}", encoding="utf-8")
    note("README.md has the table of this run")


def options_of(arguments):
    parser = argparse.ArgumentParser(prog="dev demo", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--build", required=True, help=argparse.SUPPRESS)
    parser.add_argument("--out", required=True, help=argparse.SUPPRESS)
    parser.add_argument("--device", default="auto", choices=["auto", "cuda", "emulated"])
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--config", help="the model, in TOML (default: the trainer's)")
    parser.add_argument("--budget-share", type=float, default=BUDGET_SHARE,
                        help="where the budget lies between the peaks with (0) and without (1) recomputation")
    parser.add_argument("--update-readme", action="store_true", help="write the table into README.md")
    return parser.parse_args(arguments)


def main(arguments):
    options = options_of(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    demo = None
    try:
        demo = Demo(options)
        good, table, summary = report(demo, demo.run_all())
        if options.update_readme:
            if not good:
                raise RunError("README.md is left as it is: the run was not as it should be")
            update_readme(table, summary)
        return 0 if good else 1
    except RunError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    finally:
        if demo:
            demo.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
