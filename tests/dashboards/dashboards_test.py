#!/usr/bin/env python3
"""Dashboards, rules and alerts name what exists, and every expression of them has a value on live data.

dashboards_test.py SOURCE BUILD [unittest options]
"""

import importlib.util
import json
import math
import re
import shutil
import subprocess
import sys
import unittest
import urllib.parse
from pathlib import Path

SOURCE, BUILD = Path(sys.argv.pop(1)).resolve(), Path(sys.argv.pop(1)).resolve()
sys.path.insert(0, str(SOURCE / "tests/daemon"))
from live_node import LiveNode, eventually, free_port, get  # noqa: E402

FOLDER = SOURCE / "dashboards"
RULES = FOLDER / "prometheus"
NAME = re.compile(r"\b(?:[a-z_]+:)?terrace_[a-z0-9_]+(?::[a-z0-9_]+)?")


def tables():
    """Names that /metrics may serve, as the generated document lists them; a C++ test keeps it current."""
    return set(re.findall(r"^\| `(terrace_\w+)` \|", (SOURCE / "docs/METRICS.md").read_text(), re.M))


def rules_of(file):
    """[(kind, name, expression)]: each rule's expression stands on one line."""
    found = re.findall(r"- (record|alert): (\S+)\n\s+expr: (.+)\n", (RULES / file).read_text())
    assert len(found) == (RULES / file).read_text().count("expr:"), f"{file}: an expression was not understood"
    return found


def panels():
    for file in sorted((FOLDER / "grafana").glob("*.json")):
        for panel in json.loads(file.read_text())["panels"]:
            for target in panel["targets"]:
                yield f"{file.stem}: {panel['title']}", target["expr"]


def filled_in(expression):
    """As Grafana sends it, everything selected."""
    for variable, value in (("$__rate_interval", "10s"), ("$node", ".+"), ("$job", ".+")):
        expression = expression.replace(variable, value)
    return expression


def sides(expression):
    """What an alert compares: its expression cut at the comparison outside of all brackets."""
    depth, quoted, at = 0, False, 0
    parts = []
    for i, character in enumerate(expression):
        quoted ^= character == '"'
        depth += 0 if quoted else (character in "({[") - (character in ")}]")
        if depth == 0 and not quoted and character in "<>=!" and expression[i - 1] == " ":
            parts.append(expression[at:i].strip())
            at = i + (2 if expression[i + 1] == "=" else 1)
    parts.append(expression[at:].strip())
    return parts


class Names(unittest.TestCase):
    def test_every_name_is_in_the_table_or_recorded(self):
        known = tables() | {name for kind, name, _ in rules_of("rules.yml") if kind == "record"}
        self.assertGreater(len(known), 20)
        texts = [("panel " + where, text) for where, text in panels()]
        texts += [(name, expression) for file in ("rules.yml", "alerts.yml") for _, name, expression in rules_of(file)]
        texts += [("console", text) for text in re.findall(r"query (?:\(printf )?\"([^\"]+)\"", self.console())]
        for where, text in texts:
            for name in NAME.findall(text):
                self.assertIn(name, known, where)

    def test_every_metric_of_the_table_is_looked_at_somewhere(self):
        # Except for what is there for other programs, or is the sum of what is shown.
        spared = {"terrace_budget_bytes", "terrace_allocated_bytes_total", "terrace_tier_peak_bytes", "terrace_planned_stall_seconds_total"}
        used = set(NAME.findall(" ".join(text for _, text in panels())))
        used |= set(NAME.findall(" ".join(rule[2] for file in ("rules.yml", "alerts.yml") for rule in rules_of(file))))
        mentioned = {name for name in tables() if name in used}
        unseen = tables() - mentioned - spared
        self.assertFalse(unseen, "no panel and no rule shows it")

    def test_the_grafana_files_are_current(self):
        spec = importlib.util.spec_from_file_location("make_grafana", FOLDER / "make_grafana.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        written = {file.name: file.read_text() for file in (FOLDER / "grafana").glob("*.json")}
        self.assertEqual(written, module.all_dashboards(), "dashboards/make_grafana.py writes them")

    def test_the_daemon_set_starts_the_daemon_as_it_is(self):
        text = (FOLDER / "kubernetes/terraced.yaml").read_text()
        command = json.loads(re.search(r"command: (\[.*\])", text).group(1))
        options = subprocess.run([BUILD / "bin/terraced", "--help"], capture_output=True, text=True, check=True).stdout
        for option in (word for word in command if word.startswith("--")):
            self.assertIn(option, options)
        policy = re.search(r"terrace\.toml: \|\n((?:    .*\n)+)", text).group(1)
        with LiveNode(SOURCE, BUILD) as node:
            (node.folder / "terrace.toml").write_text(re.sub(r"^    ", "", policy, flags=re.M))
            checked = subprocess.run([BUILD / "bin/terrace", "check", node.folder / "terrace.toml"], capture_output=True, text=True)
            self.assertEqual(checked.returncode, 0, checked.stderr)

    @staticmethod
    def console():
        return (RULES / "consoles/terrace.html").read_text()


class Promtool(unittest.TestCase):
    def promtool(self, *arguments, text=None):
        if shutil.which("promtool") is None:
            self.skipTest("no promtool on this machine")
        done = subprocess.run(["promtool", *arguments], cwd=RULES, input=text, capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        return done.stdout + done.stderr

    def test_rules_and_configuration_are_valid(self):
        self.promtool("check", "rules", "rules.yml", "alerts.yml")
        self.promtool("check", "config", "prometheus.yml")

    def test_rules_do_what_their_tests_say(self):
        self.promtool("test", "rules", "rules_test.yml")

    def test_every_alert_has_a_test(self):
        tested = set(re.findall(r"alertname: (\w+)", (RULES / "rules_test.yml").read_text()))
        self.assertEqual({name for _, name, _ in rules_of("alerts.yml")}, tested)


class Live(unittest.TestCase):
    """One node and one server for all."""

    @classmethod
    def setUpClass(cls):
        if shutil.which("prometheus") is None:
            raise unittest.SkipTest("no prometheus server on this machine")
        cls.node = LiveNode(SOURCE, BUILD)
        cls.addClassCleanup(cls.node.__exit__)
        assert cls.node.start_daemon(), cls.node.log("terraced")
        cls.trainer = cls.node.start_trainer("observed")
        cls.server = f"127.0.0.1:{free_port()}"
        # The configuration that is shipped, but for the address and for haste.
        config = (RULES / "prometheus.yml").read_text().replace("127.0.0.1:9464", cls.node.address)
        for file in ("rules.yml", "alerts.yml"):
            config = config.replace(file, str(RULES / file))
        config = re.sub(r"(_interval): \d+s", r"\1: 1s", config)
        (cls.node.folder / "prometheus.yml").write_text(config)
        cls.node.start(["prometheus", f"--config.file={cls.node.folder}/prometheus.yml", f"--storage.tsdb.path={cls.node.folder}/tsdb",
                        f"--web.listen-address={cls.server}", f"--web.console.templates={RULES}/consoles",
                        f"--web.console.libraries={RULES}/consoles", "--log.level=warn"], "prometheus")
        assert eventually(lambda: get(cls.server, "/-/ready")[0] == 200), cls.node.log("prometheus")

    def ask(self, expression):
        status, body = get(self.server, "/api/v1/query?query=" + urllib.parse.quote(expression))
        answer = json.loads(body) if status is not None else {}
        self.assertEqual(answer.get("status"), "success", f"{expression}: {body}")
        result = answer["data"]["result"]
        rows = [result] if answer["data"]["resultType"] == "scalar" else [row["value"] for row in result]
        return [float(value) for _, value in rows]

    def has_a_value(self, expression):
        return any(math.isfinite(value) for value in self.ask(expression))

    def test_every_expression_has_a_value(self):
        wanted = [(where, filled_in(expression)) for where, expression in panels()]
        for file in ("rules.yml", "alerts.yml"):
            wanted += [(name, side) for _, name, expression in rules_of(file) for side in sides(expression)]
        wanted += [(name, name) for _, name, _ in rules_of("rules.yml")]
        self.assertGreater(len(wanted), 70)
        missing = []
        for where, expression in wanted:
            self.assertIsNone(self.trainer.poll(), self.node.log("observed"))
            # What is missing now may come; where much is, nothing will.
            patience = 45 if not missing else 0
            if not eventually(lambda: self.has_a_value(expression), patience):
                missing.append(f"{where}: {expression}")
        self.assertFalse(missing, "no value for\n" + "\n".join(missing))

    def test_the_console_shows_the_node_and_the_job(self):
        self.assertTrue(eventually(lambda: self.has_a_value("job:terrace_stalled:ratio5m")))
        status, page = get(self.server, "/consoles/terrace.html")
        self.assertEqual(status, 200, page)
        self.assertIn(self.node.address, page)
        row = re.search(r"<td>observed</td>(.*?)</tr>", page, re.S)
        self.assertIsNotNone(row, page)
        self.assertNotIn("<td></td>", row.group(1), "a query of the console has no value")

    def test_what_is_scraped_is_valid(self):
        done = subprocess.run(["promtool", "check", "metrics"], input=self.node.metrics(), capture_output=True, text=True)
        self.assertEqual((done.returncode, done.stdout + done.stderr), (0, ""))


if __name__ == "__main__":
    unittest.main()
