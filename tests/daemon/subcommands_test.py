#!/usr/bin/env python3
"""subcommands_test.py BUILD: doctor, top, history, advise, support and the completions, as a user meets them."""

import fcntl
import gzip
import io
import json
import os
import pty
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import tarfile
import tempfile
import termios
import time
import unittest
from pathlib import Path

BUILD = Path(sys.argv.pop(1)).resolve() if len(sys.argv) > 1 else None
PATIENCE = 60  # seconds, for a loaded machine under a sanitizer; nothing is timed
GIB = 1 << 30


def environment(**more):
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TERRACE_", "NO_COLOR", "LD_PRELOAD"))}
    return {**kept, "TERM": "xterm", **more}


def terrace(*arguments, env=None):
    return subprocess.run([BUILD / "bin/terrace", *map(str, arguments)], capture_output=True, text=True, check=False,
                          timeout=PATIENCE * 4, env=environment(**(env or {})), stdin=subprocess.DEVNULL)


def eventually(holds):
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        value = holds()
        if value:
            return value
        time.sleep(0.02)
    raise AssertionError("it did not come to that")


class WithFolder(unittest.TestCase):
    def setUp(self):
        holder = tempfile.TemporaryDirectory(prefix="terrace-")
        self.addCleanup(holder.cleanup)
        self.folder = Path(holder.name)
        self.socket = self.folder / "terraced.sock"

    def start(self, *command, env=None):
        process = subprocess.Popen([*map(str, command)], env=environment(**(env or {})), stdout=subprocess.PIPE,
                                   stderr=subprocess.DEVNULL, text=True)
        self.addCleanup(process.stdout.close)
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        return process

    def start_daemon(self):
        daemon = self.start(BUILD / "bin/terraced", "--socket", self.socket, "--listen", "127.0.0.1:0", "--hbm", "4GiB", "--ddr", "2GiB")
        eventually(lambda: terrace("status", "--socket", self.socket).returncode == 0)
        return daemon

    def start_client(self, job, mode="hold"):
        client = self.start(BUILD / "bin/terrace_test_client", mode, env={"TERRACE_SOCKET": str(self.socket), "TERRACE_JOB": job})
        self.assertEqual(client.stdout.readline(), "ready\n")
        return client


# ---------------------------------------------------------------- doctor


class Doctor(WithFolder):
    """A machine of files: eight GPUs and two nodes, all in order, until a test breaks something."""

    def setUp(self):
        super().setUp()
        self.write("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Release Build\n")
        self.write("proc/driver/nvidia/gpus/0000:1b:00.0/information", "Model: H200\n")
        self.write("sys/bus/pci/devices/0000:1b:00.0/numa_node", "0\n")
        self.write("dev/nvidiactl", "")
        self.write("dev/nvidia-uvm", "")
        self.write("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n")
        self.write("sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", "512\n")
        self.write("proc/meminfo", f"MemTotal: {64 * GIB >> 10} kB\nMemAvailable: {60 * GIB >> 10} kB\n"
                                   f"CommitLimit: {40 * GIB >> 10} kB\nCommitted_AS: {30 * GIB >> 10} kB\n")
        self.write("proc/self/limits", "Max locked memory         unlimited            unlimited            bytes\n")
        self.write("proc/self/status", "CapEff:\t0000000000000000\n")
        self.write("proc/self/cgroup", "0::/job\n")
        self.write("sys/fs/cgroup/job/memory.max", "max\n")
        self.write("proc/sys/vm/overcommit_memory", "0\n")
        for node in ("node0", "node1"):
            self.write(f"sys/devices/system/node/{node}/meminfo", "")

    def write(self, path, text):
        file = self.folder / "machine" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")

    def findings(self, policy="", socket=None):
        (self.folder / "p.toml").write_text(policy, encoding="utf-8")
        answer = terrace("doctor", "--json", "--root", self.folder / "machine", "--socket", socket or self.folder / "s",
                         "--policy", self.folder / "p.toml")
        self.assertEqual(answer.stderr, "")
        report = json.loads(answer.stdout)
        self.assertEqual(answer.returncode, 1 if report["verdict"] == "fail" else 0)
        return {finding["topic"]: finding for finding in report["findings"]}

    def expect(self, topic, verdict, what, fix="", policy=""):
        finding = self.findings(policy=policy)[topic]
        self.assertEqual(finding["verdict"], verdict, finding)
        self.assertRegex(finding["what"], what)
        self.assertRegex(finding["fix"] + "\n", fix or "\n")
        self.assertEqual(verdict == "ok", finding["fix"] == "", "whatever is wrong has a fix, and nothing else has")

    def test_a_machine_in_order(self):
        for topic, finding in self.findings().items():
            self.assertEqual((finding["verdict"], finding["fix"]), ("ok", ""), topic)
        self.expect("driver", "ok", "580.65.06, 1 GPU")

    def test_driver(self):
        (self.folder / "machine/dev/nvidia-uvm").unlink()
        self.expect("driver", "fail", "nvidia-uvm is missing", "nvidia-modprobe")
        shutil.rmtree(self.folder / "machine/proc/driver/nvidia/gpus")
        self.expect("driver", "fail", "0 GPUs", "dmesg")
        (self.folder / "machine/proc/driver/nvidia/version").unlink()
        self.expect("driver", "warn", "emulated device only", "modprobe")

    def test_peers_that_nobody_can_ask_about(self):
        self.expect("peers", "ok", "1 GPU")
        self.write("proc/driver/nvidia/gpus/0000:2b:00.0/information", "")
        self.assertIn(self.findings()["peers"]["verdict"], ("ok", "warn"))  # the driver of this machine answers, if there is one

    def test_huge_pages(self):
        self.write("sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]\n")
        self.expect("huge pages", "warn", "are off", "echo madvise")
        self.expect("huge pages", "ok", "small pages", policy="[ddr]\nhugepages = false\n")
        self.expect("huge pages", "warn", "1.0 GiB of 2 MiB pages", "nr_hugepages=1024", policy="[ddr]\nhugepages = 'explicit'\nbudget = '2GiB'\n")
        self.expect("huge pages", "ok", "1.0 GiB", policy="[ddr]\nhugepages = 'explicit'\nbudget = '1GiB'\n")

    def test_locked_memory(self):
        self.write("proc/self/limits", "Max locked memory         65536                65536                bytes\n")
        self.expect("locked memory", "warn", "64.0 KiB", "ulimit -l unlimited")
        self.expect("locked memory", "ok", "64.0 KiB", policy="[ddr]\nbudget = '32KiB'\n")
        self.write("proc/self/status", "CapEff:\t0000000000004000\n")
        self.expect("locked memory", "ok", "does not bind")

    def test_control_group(self):
        self.expect("control group", "ok", "the machine's 64.0 GiB")
        self.write("sys/fs/cgroup/job/memory.max", f"{8 * GIB}\n")
        self.write("sys/fs/cgroup/job/memory.current", f"{7 * GIB}\n")
        self.expect("control group", "warn", "8.0 GiB, 1.0 GiB of it", "lower ddr.budget")
        self.expect("control group", "fail", "16.0 GiB", "memory.max", policy="[ddr]\nbudget = '16GiB'\n")
        (self.folder / "machine/proc/meminfo").unlink()
        self.expect("control group", "fail", "meminfo", "mount proc")

    def test_overcommit(self):
        self.write("proc/sys/vm/overcommit_memory", "2\n")
        self.expect("overcommit", "fail", "10.0 GiB can still", "overcommit_memory=0")
        self.expect("overcommit", "ok", "10.0 GiB", policy="[ddr]\nbudget = '9GiB'\n")

    def test_numa(self):
        self.write("sys/bus/pci/devices/0000:1b:00.0/numa_node", "-1\n")
        self.expect("NUMA", "warn", "2 nodes; .*0000:1b:00.0", "ddr.numa")
        self.expect("NUMA", "fail", "names node 7", "numactl", policy="[ddr]\nnuma = [0, 7]\n")

    def test_socket(self):
        self.assertIn("terrace run starts one", self.findings()["socket"]["what"])
        (self.folder / "open").mkdir()
        (self.folder / "open").chmod(0o777)
        finding = self.findings(socket=self.folder / "open/s")["socket"]
        self.assertEqual(finding["verdict"], "fail")
        self.assertIn("chmod o-w", finding["fix"])
        self.start_daemon()
        self.assertIn("answers", self.findings(socket=self.socket)["socket"]["what"])

    def test_text_has_a_line_and_a_fix_for_each(self):
        self.write("sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]\n")
        answer = terrace("doctor", "--root", self.folder / "machine", "--socket", self.folder / "s")
        self.assertEqual(answer.returncode, 0)
        self.assertRegex(answer.stdout, r"(?m)^warn  huge pages +transparent huge pages are off.*\n +allow them with")
        self.assertEqual(len(re.findall(r"(?m)^(?:ok|warn|fail) ", answer.stdout)), 8)


# ---------------------------------------------------------------- top


class Screen:
    """What a terminal shows, for the sequences that `terrace top` uses; a character past the right edge is an error."""

    def __init__(self, columns, rows):
        self.columns, self.rows = columns, rows
        self.cells = [[" "] * columns for _ in range(rows)]
        self.row = self.column = 0
        self.alternate = False
        self.overflow = False
        self.left = ""  # an unfinished sequence

    def feed(self, data):
        data = self.left + data
        at = 0
        while at < len(data):
            if data[at] == "\033":
                match = re.compile(r"\033\[([?\d;]*)([A-Za-z])").match(data, at)
                if not match:
                    break
                self.control(*match.groups())
                at = match.end()
                continue
            self.put(data[at])
            at += 1
        self.left = data[at:]

    def control(self, arguments, command):
        if command == "H":
            self.row = self.column = 0
        elif command == "K":
            self.cells[self.row][self.column:] = [" "] * (self.columns - self.column)
        elif command == "J":
            for row in range(self.row + 1 if arguments == "" else 0, self.rows):
                self.cells[row] = [" "] * self.columns
        elif arguments == "?1049":
            self.alternate = command == "h"

    def put(self, character):
        if character == "\r":
            self.column = 0
        elif character == "\n":
            self.overflow |= self.row + 1 >= self.rows
            self.row = min(self.row + 1, self.rows - 1)
        elif self.column >= self.columns:
            self.overflow = True
        else:
            self.cells[self.row][self.column] = character
            self.column += 1

    def text(self):
        return "\n".join("".join(row).rstrip() for row in self.cells)


class Top(WithFolder):
    def open_top(self, columns, rows, env=None):
        parent, child = pty.openpty()
        self.addCleanup(os.close, parent)
        fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.before = termios.tcgetattr(child)
        self.addCleanup(os.close, child)
        self.terminal, self.child = parent, child
        self.screen, self.seen = Screen(columns, rows), ""
        process = subprocess.Popen([BUILD / "bin/terrace", "top", "--socket", self.socket, "--interval", "0.1"], stdin=child,
                                   stdout=child, stderr=subprocess.PIPE, env=environment(**(env or {})), start_new_session=True,
                                   preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0))
        self.addCleanup(process.stderr.close)
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        return process

    def read(self):
        while select.select([self.terminal], [], [], 0.05)[0]:
            data = os.read(self.terminal, 65536).decode()
            self.seen += data
            self.screen.feed(data)

    def shows(self, pattern):
        def look():
            self.read()
            return re.search(pattern, self.screen.text())
        return eventually(look)

    def expect_put_back(self):
        self.read()
        self.assertFalse(self.screen.alternate)
        self.assertTrue(self.seen.endswith("\033[?7h\033[?25h\033[?1049l"), self.seen[-80:])
        self.assertEqual(termios.tcgetattr(self.child), self.before)

    def test_at_both_sizes(self):
        self.start_daemon()
        self.start_client("pretraining")
        for columns, rows in ((80, 24), (200, 50)):
            with self.subTest(columns=columns):
                top = self.open_top(columns, rows)
                self.shows(r"(?s)ddr .*1\.0 MiB leased of 2\.0 GiB.*emulated:0.* leased of 4\.0 GiB, 1 process.*pretraining +1 ")
                self.assertTrue(self.screen.alternate)
                self.assertEqual(self.screen.text().split("\n")[rows - 1], "q quits")
                self.assertFalse(self.screen.overflow, self.screen.text())
                os.write(self.terminal, b"xq")
                self.assertEqual(top.wait(PATIENCE), 0)
                self.expect_put_back()

    def test_follows_the_window_and_the_daemon(self):
        daemon = self.start_daemon()
        top = self.open_top(80, 24)
        self.shows("no process is registered")
        self.screen.columns, self.screen.rows = 100, 30
        self.screen.cells = [[" "] * 100 for _ in range(30)]
        fcntl.ioctl(self.child, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
        os.killpg(top.pid, signal.SIGWINCH)
        eventually(lambda: (self.read(), self.screen.text().split("\n")[29] == "q quits")[1])
        daemon.terminate()
        self.shows("no daemon at .*|daemon socket")
        self.start_daemon()
        self.shows("no process is registered")
        for number in (signal.SIGTERM,):
            os.kill(top.pid, number)
            self.assertEqual(top.wait(PATIENCE), 128 + number)
        self.expect_put_back()

    def test_colours_are_optional(self):
        self.start_daemon()
        for env, coloured in (({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)):
            top = self.open_top(80, 24, env)
            self.shows("hbm")
            self.assertEqual(bool(re.search(r"\033\[\d*m", self.seen)), coloured)
            os.write(self.terminal, b"\x03")  # Ctrl-C
            self.assertEqual(top.wait(PATIENCE), 128 + signal.SIGINT)
            self.expect_put_back()

    def test_without_a_terminal_or_a_daemon(self):
        answer = terrace("top", "--socket", self.socket)
        self.assertEqual((answer.returncode, answer.stderr), (1, f"terrace: no daemon at {self.socket}\n"))
        self.start_daemon()
        self.start_client("j")
        answer = terrace("top", "--socket", self.socket, "--interval", "0.1")
        self.assertEqual(answer.returncode, 0, answer.stderr)
        self.assertIn("1.0 MiB leased of 2.0 GiB", answer.stdout)
        self.assertNotIn("\033", answer.stdout)


# ---------------------------------------------------------------- history, advise, support


class Reports(WithFolder):
    def test_history_of_ended_runs(self):
        self.start_daemon()
        self.assertIn("remembers no process", terrace("history", "--socket", self.socket).stdout)
        for job in ("first", "second", "second"):
            answer = terrace("run", "--socket", self.socket, "--job", job, "--", BUILD / "bin/terrace_test_client", "0")
            self.assertEqual(answer.returncode, 0, answer.stderr)
        lines = eventually(lambda: (text := terrace("history", "--socket", self.socket).stdout.splitlines()) and len(text) == 3 and text)
        self.assertRegex(lines[0], r"^second, run [0-9a-f]{16}, 1 process: 2 steps, HBM peak 3\.0 MiB,.* moved 5\.0 MiB, cache 11 hits")
        self.assertRegex(lines[2], "^first")
        runs = json.loads(terrace("history", "--socket", self.socket, "--json").stdout)
        self.assertEqual([(run["job"], run["steps"]) for run in runs], [("second", 2), ("second", 2), ("first", 2)])

    def test_history_of_a_file(self):
        result = self.folder / "run.json"
        result.write_text(json.dumps({"steps": 7, "ms_per_step": 12.5, "tokens_per_second": 1000, "hbm_peak_bytes": GIB,
                                      "budget_bytes": 2 * GIB, "stall_seconds": 0.25, "plan": "all in HBM"}), encoding="utf-8")
        answer = terrace("history", result)
        self.assertEqual(answer.returncode, 0, answer.stderr)
        self.assertIn("7 steps, 12.5 ms each", answer.stdout)
        self.assertIn("HBM peak 1.0 GiB of 2.0 GiB", answer.stdout)
        self.assertIn("plan: all in HBM", answer.stdout)
        for text in ("{}", "nonsense", ""):
            result.write_text(text, encoding="utf-8")
            answer = terrace("history", result)
            self.assertEqual((answer.returncode, answer.stdout, answer.stderr.count("\n")), (2, "", 1), answer.stderr)

    def test_advice_about_a_running_job(self):
        self.start_daemon()
        self.assertIn("no job is running", terrace("advise", "--socket", self.socket).stderr)
        self.start_client("slow", mode="steps")
        answer = terrace("advise", "--socket", self.socket)
        self.assertEqual(answer.returncode, 0, answer.stderr)
        self.assertRegex(answer.stdout, r"^slow: (?:[3-9]|\d\d+) steps, 10\.0 ms each")
        self.assertIn("at most 20.0% of a step", answer.stdout)
        self.assertIn("[experts]\n    prefetch = 2", answer.stdout)
        self.start_client("idle")
        answer = terrace("advise", "--socket", self.socket)
        self.assertEqual(answer.returncode, 2)
        self.assertRegex(answer.stderr, "name one with --job: (idle, slow|slow, idle)")
        answer = terrace("advise", "--socket", self.socket, "--job", "idle", "--patience", "0.2")
        self.assertEqual(answer.returncode, 1)
        self.assertIn("did not finish 3 steps", answer.stderr)
        self.assertEqual(answer.stderr.count("\n"), 1)

    def test_a_support_bundle(self):
        self.start_daemon()
        self.start_client("job1")
        policy = self.folder / "p.toml"
        policy.write_text("version = 1  # password = hunter2\n", encoding="utf-8")
        (self.folder / "terraced.log").write_text("started --token abc\n", encoding="utf-8")
        out = self.folder / "b.tar.gz"
        answer = terrace("support", "--socket", self.socket, "--policy", policy, "--out", out, env={"SUPER_SECRET": "env-value"})
        self.assertEqual(answer.returncode, 0, answer.stderr)
        self.assertEqual(out.stat().st_mode & 0o777, 0o600)
        with tarfile.open(out) as archive:
            files = {member.name: archive.extractfile(member).read().decode() for member in archive.getmembers()}
        self.assertEqual(sorted(files), ["contents.txt", "doctor.json", "metrics.txt", "policy.toml", "status.json", "terraced.log", "version.txt"])
        for name in files:
            self.assertTrue(name == "contents.txt" or f"{name}: " in answer.stdout, answer.stdout)
        everything = "".join(files.values())
        for secret in ("hunter2", "abc\n", "env-value"):
            self.assertNotIn(secret, everything)
        self.assertEqual(json.loads(files["status.json"])["jobs"][0]["job"], "job1")
        self.assertIn("terrace_clients 1\n", files["metrics.txt"])
        self.assertIn('"topic":"huge pages"', files["doctor.json"])
        answer = terrace("support", "--socket", self.socket, "--out", out)
        self.assertEqual((answer.returncode, answer.stderr.count("\n")), (1, 1))
        self.assertIn("is there already", answer.stderr)

    def test_a_support_bundle_says_what_is_missing(self):
        out = self.folder / "b.tar.gz"
        answer = terrace("support", "--socket", self.socket, "--out", out)
        self.assertEqual(answer.returncode, 0, answer.stderr)
        self.assertRegex(answer.stdout, r"(?m)^status\.json: missing: no daemon")
        with tarfile.open(fileobj=io.BytesIO(gzip.decompress(out.read_bytes()))) as archive:
            self.assertNotIn("metrics.txt", archive.getnames())
        answer = terrace("support", "--socket", self.socket, "--out", self.folder / "no/such/b.tar.gz")
        self.assertEqual((answer.returncode, answer.stderr.count("\n")), (1, 1))


# ---------------------------------------------------------------- completions and the manual

BASH = """
source {script}
COMP_WORDS=({words}) COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
_terrace
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


class Completions(WithFolder):
    def script(self, shell):
        answer = terrace("completion", shell)
        self.assertEqual(answer.returncode, 0, answer.stderr)
        (self.folder / shell).write_text(answer.stdout, encoding="utf-8")
        return self.folder / shell

    def commands(self):
        return re.findall(r"(?m)^  (\S+)", re.search(r"Subcommands:\n((?:  .*\n)+)", terrace("--help").stdout).group(1))

    def bash(self, words):
        program = BASH.format(script=self.script("bash"), words=words)
        answer = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=False, timeout=PATIENCE)
        self.assertEqual(answer.stderr, "")
        return answer.stdout.split()

    def test_bash(self):
        self.assertEqual(sorted(self.bash("terrace ''")), sorted(self.commands()))
        self.assertEqual(self.bash("terrace rep"), ["replay"])
        self.assertIn("--record", self.bash("terrace run --r"))
        self.assertIn("--version", self.bash("terrace --"))
        self.assertEqual(self.bash("terrace completion ''"), ["bash", "zsh", "fish"])
        self.assertEqual(self.bash("terrace check ''"), [])  # files, which bash completes by itself
        self.assertEqual(self.bash("terrace run -- ls --"), [])

    @unittest.skipUnless(shutil.which("zsh"), "needs zsh")
    def test_zsh(self):
        script = self.script("zsh")
        subprocess.run(["zsh", "-n", script], check=True, timeout=PATIENCE)
        loaded = f"autoload -Uz compinit; compinit -u -d {self.folder}/dump; fpath=({self.folder}/f $fpath); compinit -u -d {self.folder}/dump"
        (self.folder / "f").mkdir()
        shutil.copy(script, self.folder / "f/_terrace")
        answer = subprocess.run(["zsh", "-fc", loaded + "; print $_comps[terrace]; autoload +X _terrace && print $#functions[_terrace]"],
                                capture_output=True, text=True, check=False, timeout=PATIENCE)
        self.assertTrue(answer.stdout.startswith("_terrace\n"), answer.stdout + answer.stderr)

    @unittest.skipUnless(shutil.which("fish"), "needs fish")
    def test_fish(self):
        script = self.script("fish")

        def complete(line):
            answer = subprocess.run(["fish", "--no-config", "-c", f"source {script}; complete -C '{line}'"], capture_output=True, text=True,
                                    check=False, timeout=PATIENCE, env={**os.environ, "HOME": str(self.folder)})
            self.assertEqual(answer.stderr, "")
            return [row.split("\t")[0] for row in answer.stdout.splitlines()]

        self.assertEqual(sorted(complete("terrace ")), sorted(self.commands()))
        self.assertIn("--record", complete("terrace run --r"))
        self.assertEqual(sorted(complete("terrace completion ")), ["bash", "fish", "zsh"])

    def test_the_manuals_name_every_command_and_option(self):
        manual = terrace("--manual").stdout.replace("\\-", "-")
        for command in self.commands():
            self.assertIn(f"\\fBterrace {command}\\fR", manual)
            for option in re.findall(r"(?m)^  (?:-\w,)?(--[\w-]+)", terrace(command, "--help").stdout):
                self.assertIn(f"\\fB{option}\\fR", manual)
        daemon = subprocess.run([BUILD / "bin/terraced", "--manual"], capture_output=True, text=True, check=True).stdout
        self.assertIn("\\fB\\-\\-exit\\-when\\-idle\\fR", daemon)
        if shutil.which("groff") is None:
            self.skipTest("whether the pages render without a warning needs groff")
        for page in (terrace("--manual").stdout, daemon):
            answer = subprocess.run(["groff", "-man", "-Tutf8", "-ww", "-z"], input=page, capture_output=True, text=True, check=False)
            self.assertEqual(answer.stderr, "")


if __name__ == "__main__":
    unittest.main()
