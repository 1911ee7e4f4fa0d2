"""Starts programs under `terrace run`, in a folder of their own, with a daemon of their own."""

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

BIN = Path(os.environ.get("TERRACE_BIN", "build/release/bin"))

# What a training does: more than 1 MiB is saved, ten times over. Prints what Terrace counted, if it is there.
TRAINING = """
import sys, torch
torch.set_num_threads(1)
torch.manual_seed(0)
x = torch.randn(512, 1024, requires_grad=True)
for step in range(3):
    y = x * 1
    for _ in range(10):
        y = (y * 1.01).sin()
    y.sum().backward()
print("loss", float(y.sum()).hex(), float(x.grad.sum()).hex())
terrace = sys.modules.get("terrace.torch")
print("terrace", terrace is not None and terrace.figures().get("restored_bytes", 0) > 0)
"""


class Place:
    """A folder with a policy, programs and a socket; ends the daemon that was started for it."""

    def __enter__(self):
        self._folder = tempfile.TemporaryDirectory()
        self.path = Path(self._folder.name)
        (self.path / "policy.toml").write_text(
            'version = 1\n[checkpoint]\nbudget = "4MiB"\n[hbm]\nbudget = "1GiB"\nreserve = "0"\n'
            '[ddr]\nbudget = "256MiB"\nhugepages = false\n')
        return self

    def __exit__(self, *error):
        # The daemon ends a little after its last client; what keeps the folder is its socket.
        deadline = time.monotonic() + 10
        status = [str(BIN / "terrace"), "status", "--socket", str(self.path / "s"), "--json"]
        answer = subprocess.run(status, capture_output=True, text=True, check=False)
        if answer.returncode == 0:
            import json

            pid = json.loads(answer.stdout).get("pid")
            if pid:
                os.kill(pid, signal.SIGTERM)
                while (self.path / "s").exists() and time.monotonic() < deadline:
                    time.sleep(0.02)
        self._folder.cleanup()

    def write(self, name, text):
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return str(path)

    def environment(self, more=None):
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("TERRACE_", "PYTHON"))}
        clean.update(TERRACE_TORCH_DEVICE="emulated", PYTHONDONTWRITEBYTECODE="1", **(more or {}))
        return clean

    def command(self, arguments, policy=None):
        return [str(BIN / "terrace"), "run", "--socket", str(self.path / "s"), "--listen", "127.0.0.1:0", "--policy",
                str(policy or self.path / "policy.toml"), "--", *arguments]

    def run(self, arguments, environment=None, policy=None):
        return subprocess.run(self.command(arguments, policy), env=self.environment(environment), cwd=self.path,
                              capture_output=True, text=True, timeout=120, check=False)

    def plain(self, arguments):
        return subprocess.run(arguments, env=self.environment(), cwd=self.path, capture_output=True, text=True,
                              timeout=120, check=False)


PYTHON = sys.executable
