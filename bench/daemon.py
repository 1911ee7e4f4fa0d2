#!/usr/bin/env python3
"""terraced under load: 64 clients of 8 emulated GPUs allocate as fast as they can, and are scraped every second.

The clients share one core, the daemon has the other. Rows: CPU a scrape, the scrape's latency as the client sees it,
the daemon's share of a core while clients rest and while they allocate, how often its leases were exceeded (an
independent reader of the clients' shared pages looks), and how its memory grows. Floors are the limits that the
design sets. Ends with an error where one is not kept.
"""

import argparse
import http.client
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

DEVICES = 8
CLIENTS = 64
DEVICE_BUDGET = 256 << 20
LIMITS = {  # metric: (unit, the most that is allowed)
    "cpu_per_scrape": ("ms", 2.0),
    "scrape_p99": ("ms", 10.0),
    "cpu_idle": ("percent", 1.0),
    "cpu_under_load": ("percent", 5.0),
    "leases_exceeded": ("count", 0),
    "memory_growth": ("MiB", 1.0),
}


class DaemonError(Exception):
    pass


def cpu_seconds(pid):
    """What every thread of a process has run, from the scheduler's own nanoseconds."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            total += int((task / "schedstat").read_text().split()[0])
        except (OSError, IndexError):
            continue  # the thread has ended
    return total / 1e9


def resident_bytes(pid):
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def scrape(address):
    began = time.perf_counter()
    connection = http.client.HTTPConnection(address, timeout=30)
    connection.request("GET", "/metrics")
    body = connection.getresponse().read()
    connection.close()
    if b"terrace_clients 64" not in body:
        raise DaemonError("a scrape does not show the clients")
    return time.perf_counter() - began


def percentile(values, share):
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


class Load:
    """A daemon and its clients, on a core each where there are two."""

    def __init__(self, build, folder):
        cores = sorted(os.sched_getaffinity(0))
        self.daemon_core, self.load_core = {cores[-1]}, {cores[0]}
        os.sched_setaffinity(0, self.daemon_core)  # who scrapes is not the load
        self.build, self.folder = build, Path(folder)
        self.socket = str(self.folder / "terraced.sock")
        self.children = []
        self.daemon = self.start(
            ["terraced", "--socket", self.socket, "--listen", "127.0.0.1:0", "--hbm", str(DEVICE_BUDGET)],
            self.daemon_core, stderr=open(self.folder / "log", "w"))
        self.address = self.until_it_answers()

    def start(self, command, cores, **options):
        child = subprocess.Popen([str(self.build / "bin" / command[0])] + command[1:], **options)
        os.sched_setaffinity(child.pid, cores)
        self.children.append(child)
        return child

    def until_it_answers(self):
        mark = "metrics at "
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            log = (self.folder / "log").read_text()
            if mark in log:
                return log.split(mark)[1].split()[0]
            time.sleep(0.05)
        raise DaemonError("terraced does not start: " + (self.folder / "log").read_text())

    def add_clients(self):
        self.clients = [
            self.start(["daemon_load", "client", self.socket, str(i % DEVICES)], self.load_core,
                       stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
            for i in range(CLIENTS)]
        for client in self.clients:
            if client.stdout.readline() != "ready\n":
                raise DaemonError("a client does not start")
        pairs = [text for i, client in enumerate(self.clients) for text in (str(client.pid), str(i % DEVICES))]
        self.watch = self.start(["daemon_load", "watch", str(DEVICE_BUDGET)] + pairs, self.load_core,
                                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def tell(self, command):
        for client in self.clients:
            client.stdin.write(command + "\n")

    def watched(self):
        return json.loads(self.watch.communicate("stop\n")[0])

    def stop(self):
        for child in self.children:
            child.kill()
            child.wait()


def scrape_each_second(load, seconds):
    """CPU share of the daemon, latencies, memory along the way."""
    latencies, memory = [], []
    began, before = time.monotonic(), cpu_seconds(load.daemon.pid)
    while time.monotonic() < began + seconds:
        next_scrape = time.monotonic() + 1
        latencies.append(scrape(load.address))
        memory.append(resident_bytes(load.daemon.pid))
        time.sleep(max(0, next_scrape - time.monotonic()))
    share = (cpu_seconds(load.daemon.pid) - before) / (time.monotonic() - began)
    return share, latencies, memory


def cpu_of_scrapes(load, count):
    before = cpu_seconds(load.daemon.pid)
    for _ in range(count):
        scrape(load.address)
    return (cpu_seconds(load.daemon.pid) - before) / count


def measure(options):
    with tempfile.TemporaryDirectory() as folder:
        load = Load(options.build, folder)
        try:
            load.add_clients()
            idle_began, idle_before = time.monotonic(), cpu_seconds(load.daemon.pid)
            time.sleep(max(3, options.seconds / 10))
            idle = (cpu_seconds(load.daemon.pid) - idle_before) / (time.monotonic() - idle_began)
            per_scrape = cpu_of_scrapes(load, 100)
            load.tell("go")
            share, latencies, memory = scrape_each_second(load, options.seconds)
            load.tell("rest")
            watched = load.watched()
        finally:
            load.stop()
    # What the allocator of the daemon has once taken for a scrape it keeps: from the first third on it is flat.
    settled = memory[len(memory) // 3:]
    growth = max(0, statistics.median(settled[-5:]) - statistics.median(settled[:5])) / (1 << 20)
    if watched["looks"] == 0 or watched["most"] == 0:
        raise DaemonError("nobody watched")
    return {"cpu_per_scrape": per_scrape * 1e3, "scrape_p99": percentile(latencies, 0.99) * 1e3,
            "cpu_idle": idle * 100, "cpu_under_load": share * 100,
            "leases_exceeded": watched["exceeded"], "memory_growth": growth}


def main(arguments):
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--build", required=True, type=Path)
    parser.add_argument("--device", default="auto", help="not read: the GPUs are emulated")
    parser.add_argument("--seconds", type=float, default=300, help="of load")
    options = parser.parse_args(arguments)
    try:
        values = measure(options)
    except (DaemonError, OSError) as error:
        print(f"daemon: {error}", file=sys.stderr)
        return 1
    kept = True
    for metric, value in values.items():
        unit, most = LIMITS[metric]
        print(json.dumps({"bench": "daemon", "case": f"{CLIENTS} clients, {DEVICES} devices", "system": "terrace",
                          "metric": metric, "value": round(value, 3), "unit": unit, "floor": most}))
        if value > most:
            print(f"daemon: {metric} is {value:.3f} {unit}, more than {most}", file=sys.stderr)
            kept = False
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
