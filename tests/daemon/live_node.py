"""A daemon with a trainer under it, as a user starts them, in a folder of their own; for tests that watch from outside."""

import os
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

PATIENCE = 60  # seconds; nothing is timed
POLICY = """[swapcore]
mode = "auto"
[[swapcore.rule]]
match = "layer.*.kda.q"
action = "ddr"
[optimizer]
tier = "ddr"
"""


def free_port():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


def get(address, path, patience=10):
    """Status and body; None and what went wrong where nobody answers."""
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=patience) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(errors="replace")
    except OSError as error:
        return None, str(error)


def eventually(holds, patience=PATIENCE):
    deadline = time.monotonic() + patience
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


class LiveNode:
    def __init__(self, source, build):
        self.source, self.build = Path(source), Path(build)
        self._folder = tempfile.TemporaryDirectory(prefix="terrace-node-")
        self.folder = Path(self._folder.name)
        self.address = f"127.0.0.1:{free_port()}"
        self._children = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for child in reversed(self._children):
            child.send_signal(signal.SIGCONT)
            child.kill()
            child.wait()
        self._folder.cleanup()

    def start(self, command, name, environment=None):
        with (self.folder / f"{name}.log").open("wb") as log:
            child = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=self.folder,
                                     env={**os.environ, **(environment or {})})
        self._children.append(child)
        return child

    def log(self, name):
        return (self.folder / f"{name}.log").read_text(errors="replace")[-2000:]

    def start_daemon(self):
        self.start([self.build / "bin/terraced", "--socket", self.folder / "terraced.sock", "--listen", self.address,
                    "--hbm", "8GiB", "--ddr", "4GiB"], "terraced")
        return eventually(lambda: get(self.address, "/healthz")[0] == 200)

    def start_trainer(self, job, options=()):
        """Trains until it is killed, with Swap Core at work."""
        (self.folder / "policy.toml").write_text(POLICY)
        (self.folder / "text.txt").write_text("".join(
            f"Chapter {i * 7919 % 1000}. The link is free only inside windows; what fits is moved.\n" for i in range(400)))
        command = [self.build / "bin/moe_trainer", "--config", self.source / "examples/moe_trainer/configs/tiny.toml",
                   "--data", self.folder / "text.txt", "--device", "emulated", "--seed", "1", "--no-progress", "--steps", "1000000",
                   "--recompute", "full", "--policy", self.folder / "policy.toml", *options]
        return self.start(command, job, {"TERRACE_SOCKET": str(self.folder / "terraced.sock"), "TERRACE_JOB": job})

    def metrics(self):
        return get(self.address, "/metrics")[1]

    def series(self):
        """The values of /metrics by series, as they are printed there."""
        lines = (line for line in self.metrics().splitlines() if line and not line.startswith("#"))
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}
