"""Runs of the trainer that are compared with one another: their text, their logs, what their turns come to.

Runs take turns of some steps each: a machine that is faster now than in five minutes is so for all of them.
"""

import argparse
import os
import pty
import re
import select
import signal
import subprocess
import sys
from pathlib import Path

TEXT_FOLDER = "/usr/share/games/fortunes"  # Debian package fortunes
TEXT_FILES = ["art", "computers", "cookie", "definitions", "humorists", "law", "literature", "medicine", "men-women",
              "people", "politics", "science", "songs-poems", "wisdom", "work"]
HIGHEST = ("hbm_peak_bytes", "ddr_peak_bytes")
COUNTED = ("cache_hits", "cache_misses", "cache_late", "cache_evictions", "stall_seconds")
CONTROL = re.compile(r"\r\n|\r|\x1b\[[0-9;]*[A-Za-z]")  # what a progress bar writes between its lines


class RunError(Exception):
    pass


def merged(turns):
    """One result of a run's turns: its losses in order, the mean step, the highest peaks, the sum of what was counted."""
    result = dict(turns[-1])
    for key in ("losses", "losses_hex"):
        result[key] = [loss for turn in turns for loss in turn[key]]
    for key in HIGHEST:
        result[key] = max(turn[key] for turn in turns)
    for key in COUNTED:
        result[key] = sum(turn.get(key, 0) for turn in turns)
    tokens_per_step = turns[0]["ms_per_step"] * turns[0]["tokens_per_second"] / 1e3
    result["ms_per_step"] = sum(turn["ms_per_step"] for turn in turns) / len(turns)
    result["tokens_per_second"] = tokens_per_step / result["ms_per_step"] * 1e3 if result["ms_per_step"] else 0
    return result


def losses_equal(results):
    """Whether there are losses, and all results have the same, bit for bit."""
    bits = [result.get("losses_hex", []) for result in results]
    return bool(bits and bits[0]) and all(other == bits[0] for other in bits)


def bench_parser(name, about, presets):
    """The command line that benches of the trainer share; each adds its own to it, and settled() fills it in."""
    parser = argparse.ArgumentParser(prog=f"dev bench {name}", description=about.split("\n\n", 1)[0])
    parser.add_argument("--build", required=True, type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--device", default="auto", choices=["auto", "cuda", "emulated"])
    parser.add_argument("--preset", choices=sorted(presets), help="default: slice on CUDA, nano on the emulated device")
    parser.add_argument("--quick", action="store_true", help="preset tiny: that everything runs, not how fast")
    parser.add_argument("--data", nargs="+", help="text (default: that of the demo)")
    parser.add_argument("--out", type=Path, help=f"where results and logs are kept (default: bench/{name} beside the build)")
    return parser


def settled(options, name):
    if options.device == "auto":
        options.device = "cuda" if Path("/dev/nvidia0").exists() else "emulated"
    options.preset = "tiny" if options.quick else options.preset or ("slice" if options.device == "cuda" else "nano")
    options.out = options.out or options.build.resolve().parent / "bench" / name
    return options


def only_the_command_line_counts():
    """What the environment would tell the trainer is for the cases to say; a request to end is an interrupt."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    for name in ("TERRACE_POLICY", "TERRACE_SOCKET"):
        os.environ.pop(name, None)


def outcome_of(name, run):
    """The exit code of a bench whose run() returns what is wrong: 0 where nothing is, 130 after an interrupt."""
    only_the_command_line_counts()
    try:
        wrongs = run()
    except RunError as error:
        wrongs = [str(error)]
    except KeyboardInterrupt:
        return 130
    for wrong in wrongs:
        print(f"{name}: {wrong}", file=sys.stderr, flush=True)
    return 1 if wrongs else 0


def text_files():
    folder = Path(os.environ.get("TERRACE_TEXT_DIR", TEXT_FOLDER))
    files = [folder / name for name in TEXT_FILES if (folder / name).is_file()]
    if not files:
        raise RunError(f"no text in {folder}; install the package fortunes (./dev setup), "
                       "or name a folder that holds its files in TERRACE_TEXT_DIR")
    return files


def run_logged(command, log):
    """Runs a command with its output in a log, and on our terminal too where there is one (the trainer then draws its
    progress). An interrupt is passed on once, and the command is waited for."""
    shown = sys.stderr.isatty()
    ours, theirs = pty.openpty() if shown else os.pipe()
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs, start_new_session=True)
    os.close(theirs)
    interrupted = None
    while True:
        try:
            # Whoever outlives the command (a daemon) may hold the other side: its end is the command's, not the pipe's.
            if not select.select([ours], [], [], 0.2)[0]:
                if child.poll() is not None:
                    break
                continue
            said = os.read(ours, 65536)
        except OSError:  # a terminal whose other side is closed
            break
        except KeyboardInterrupt as interrupt:
            interrupted = interrupt
            child.send_signal(signal.SIGINT)
            continue
        if not said:
            break
        log.write(said)
        log.flush()
        if shown:
            sys.stderr.buffer.write(said)
            sys.stderr.flush()
    os.close(ours)
    child.wait()
    if interrupted:
        raise interrupted
    return child.returncode


def log_text(path):
    return CONTROL.sub("\n", path.read_text(encoding="utf-8", errors="replace"))


def last_lines(log, count=15):
    return "\n".join([line for line in log.split("\n") if line.strip()][-count:])


def mib(value):
    return "-" if value is None else f"{value / 2**20:.1f} MiB"
