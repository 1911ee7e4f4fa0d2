#!/usr/bin/env python3
"""The demo's verdicts and the benchmark's comparison, tried on programs that stand in for terrace and the trainer."""

import importlib.util
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import unittest
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# `terrace run` runs the command; `terrace status` names the server below; the trainer obeys FAKE_* variables.
TERRACE = """#!/usr/bin/env python3
import json, os, sys
if sys.argv[1] == "run":
    command = sys.argv[sys.argv.index("--") + 1:]
    os.execv(command[0], command)
print(json.dumps({"listen": os.environ["FAKE_LISTEN"], "pid": 0}))
"""
TRAINER = """#!/usr/bin/env python3
import json, os, sys, time
options = dict(zip(sys.argv[1:], sys.argv[2:]))
recompute, swapcore = options["--recompute"], options["--swapcore"]
if recompute == "none" and "--hbm" in options:
    print(os.environ.get("FAKE_REFUSAL", "out of the hbm budget: 12 MiB missing for activations; [hbm] budget would help"))
    sys.exit(int(os.environ.get("FAKE_REFUSAL_CODE", "3")))
if swapcore == "auto":
    time.sleep(1.5)
checkpoint = options.get("--checkpoint")
if checkpoint:
    if ("--resume" in options) != os.path.exists(checkpoint):
        sys.exit("a second turn goes on from the checkpoint of the first, and only that")
    open(checkpoint, "a").close()
losses = [5.5, 5.0, 2.5 if swapcore == "off" else float(os.environ.get("FAKE_SWAPCORE_LOSS", "2.5"))]
peak = {"none": 1000, "full": 500}[recompute] + (int(os.environ.get("FAKE_OVERSHOOT", "300")) if swapcore == "auto" else 0)
json.dump({"ms_per_step": 10.0, "tokens_per_second": 100.0, "hbm_peak_bytes": peak, "ddr_peak_bytes": 7, "cache_hits": 1,
           "cache_misses": 2, "cache_late": 0, "losses": losses, "losses_hex": [l.hex() for l in losses],
           "device": "emulated"}, open(options["--json"], "w"))
"""
SERVER = """
import http.server
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b'terrace_steps_total{job="swapcore"} 3\\n')
    def log_message(self, *_): pass
server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
"""


def load(name, path):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


class Demo(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        (self.folder / "bin").mkdir()
        (self.folder / "text").mkdir()
        (self.folder / "text" / "wisdom").write_text("some text", encoding="utf-8")
        for name, text in (("terrace", TERRACE), ("moe_trainer", TRAINER)):
            (self.folder / "bin" / name).write_text(text, encoding="utf-8")
            (self.folder / "bin" / name).chmod(0o755)
        self.server = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
        self.addCleanup(self.server.stdout.close)
        self.addCleanup(self.server.wait)
        self.addCleanup(self.server.kill)
        self.listen = f"127.0.0.1:{self.server.stdout.readline().strip()}"

    def run_demo(self, steps=12, **fakes):
        environment = {**os.environ, "TERRACE_TEXT_DIR": str(self.folder / "text"), "FAKE_LISTEN": self.listen, **fakes}
        command = [sys.executable, str(ROOT / "examples" / "demo.py"), "--build", str(self.folder), "--out", str(self.folder / "out"), "--steps", str(steps)]
        return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)

    def expect_wrong(self, words, **fakes):
        answer = self.run_demo(**fakes)
        self.assertEqual(answer.returncode, 1, answer.stdout)
        wrong = [line for line in answer.stdout.split("\n") if line.startswith("WRONG")]
        self.assertEqual(len(wrong), 1, answer.stdout)
        self.assertIn(words, wrong[0])

    def test_all_as_it_should_be(self):
        answer = self.run_demo()
        self.assertEqual(answer.returncode, 0, answer.stdout + answer.stderr)
        summary = json.loads((self.folder / "out" / "summary.json").read_text(encoding="utf-8"))
        self.assertEqual(summary["budget_bytes"], 800)
        self.assertEqual([run["name"] for run in summary["runs"]], ["fits", "no-tiering", "recompute", "swapcore"])
        self.assertEqual([run["exit_code"] for run in summary["runs"]], [0, 3, 0, 0])
        self.assertEqual(summary["runs"][3]["steps"], 3)
        self.assertIn("terrace_steps_total", (self.folder / "out" / "metrics.prom").read_text(encoding="utf-8"))

    def test_runs_take_turns(self):
        answer = self.run_demo(steps=32)
        self.assertEqual(answer.returncode, 0, answer.stdout + answer.stderr)
        order = [line.split(":")[1].strip() for line in answer.stderr.split("\n") if re.search(r"exit code 0, \d+ s$", line)]
        self.assertEqual([name for name in order if name in ("fits", "recompute")], ["fits", "recompute"] * 2)
        summary = json.loads((self.folder / "out" / "summary.json").read_text(encoding="utf-8"))
        self.assertEqual(summary["runs"][0]["steps"], 6)
        self.assertEqual(summary["runs"][3]["cache_hits"], 2)
        self.assertAlmostEqual(summary["runs"][0]["ms_per_step"], 10)
        self.assertEqual(list((self.folder / "out").glob("*.safetensors")), [])

    def test_other_bits(self):
        self.expect_wrong("bit for bit", FAKE_SWAPCORE_LOSS="2.5000001")

    def test_over_the_budget(self):
        self.expect_wrong("within the budget", FAKE_OVERSHOOT="301")

    def test_no_message(self):
        self.expect_wrong("how much was missing", FAKE_REFUSAL="Killed")

    def test_budget_that_did_not_bind(self):
        self.expect_wrong("no-tiering ends", FAKE_REFUSAL_CODE="0")

    def test_no_metrics(self):
        self.expect_wrong("metrics were read", FAKE_LISTEN="127.0.0.1:1")

    def test_no_text(self):
        answer = self.run_demo(TERRACE_TEXT_DIR=str(self.folder / "nowhere"))
        self.assertEqual(answer.returncode, 1)
        self.assertEqual(len(answer.stderr.strip().split("\n")), 1, answer.stderr)
        self.assertIn("fortunes", answer.stderr)


class Bench(unittest.TestCase):
    bench = load("run_bench", ROOT / "bench" / "run_bench.py")

    def row(self, value, metric="ms_per_step", unit="ms", system="terrace"):
        return {"bench": "b", "case": "c", "system": system, "metric": metric, "value": value, "unit": unit, "floor": None}

    def losses(self, old, new):
        return list(self.bench.losses_against(old, new))

    def test_times_and_bytes_are_better_when_lower(self):
        self.assertEqual(len(self.losses([self.row(100)], [self.row(111)])), 1)
        self.assertEqual(self.losses([self.row(100)], [self.row(109)]), [])
        self.assertEqual(self.losses([self.row(100)], [self.row(10)]), [])

    def test_rates_are_better_when_higher(self):
        for metric, unit in (("tokens_per_second", "tokens/s"), ("h2d", "GB/s")):
            self.assertEqual(len(self.losses([self.row(100, metric, unit)], [self.row(89, metric, unit)])), 1)
            self.assertEqual(self.losses([self.row(100, metric, unit)], [self.row(91, metric, unit)]), [])
            self.assertEqual(self.losses([self.row(100, metric, unit)], [self.row(300, metric, unit)]), [])

    def test_only_our_rows_count_and_none_may_vanish(self):
        self.assertEqual(self.losses([self.row(100, system="peer")], [self.row(500, system="peer")]), [])
        self.assertIn("no longer measured", self.losses([self.row(100)], [])[0])

    def test_a_row_of_another_shape_is_refused(self):
        with self.assertRaises(self.bench.BenchError):
            self.bench.row_of('{"bench": "b"}', "here")
        with self.assertRaises(self.bench.BenchError):
            self.bench.row_of("hello", "here")

    def test_unknown_names_are_answered_with_the_known(self):
        said = io.StringIO()
        with redirect_stderr(said), redirect_stdout(io.StringIO()):
            self.assertEqual(self.bench.main(["nothing", "--build", "nowhere"]), 2)
        self.assertIn("demo", said.getvalue())


class Dev(unittest.TestCase):
    def test_refuses_what_it_does_not_know(self):
        for arguments in (["frobnicate"], ["test", "--frob"], ["test", "-L"], ["check", "x"], ["setup", "x"]):
            answer = subprocess.run([str(ROOT / "dev"), *arguments], capture_output=True, text=True, check=False)
            self.assertNotEqual(answer.returncode, 0, arguments)
            self.assertIn("dev:", answer.stderr)


if __name__ == "__main__":
    unittest.main()
