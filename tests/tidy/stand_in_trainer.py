"""Benches of the trainer, run with a program that stands in for it."""
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

BENCH = Path(__file__).resolve().parents[2] / "bench"


def load(name):
    """The module bench/NAME.py."""
    sys.path.insert(0, str(BENCH))
    spec = importlib.util.spec_from_file_location(name, BENCH / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


class StandInBench(unittest.TestCase):
    bench_name, trainer = "", ""  # of bench/NAME.py; the program's source

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        (self.folder / "bin").mkdir()
        (self.folder / "text").write_text("some text", encoding="utf-8")
        trainer = self.folder / "bin" / "moe_trainer"
        trainer.write_text(self.trainer, encoding="utf-8")
        trainer.chmod(0o755)

    def take_rows(self, *more, **fakes):
        """What the bench answered, and its rows; `fakes` are told to the stand-in by its environment."""
        command = [sys.executable, str(BENCH / f"{self.bench_name}.py"), "--build", str(self.folder), "--device", "emulated", "--quick",
                   "--data", str(self.folder / "text"), "--out", str(self.folder / "out"), "--steps", "3", *more]
        answer = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **fakes})
        return answer, [json.loads(line) for line in answer.stdout.splitlines()]
