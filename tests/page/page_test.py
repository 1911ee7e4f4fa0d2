#!/usr/bin/env python3
"""The daemon's page as a person meets it: a browser opens it while a job trains, and the plots hold what /metrics says.

page_test.py SOURCE BUILD [unittest options]
"""

import json
import signal
import sys
import unittest
from pathlib import Path

SOURCE, BUILD = Path(sys.argv.pop(1)).resolve(), Path(sys.argv.pop(1)).resolve()
sys.path[:0] = [str(SOURCE / "tests/daemon"), str(SOURCE / "tests/page")]
from browser import Browser, chromium  # noqa: E402
from live_node import LiveNode, eventually, get  # noqa: E402

POOLS = ["weights", "optimizer", "gradient", "activation", "expert", "comm", "scratch"]
JOB = "observed"


@unittest.skipIf(chromium() is None, "no chromium on this machine")
class Page(unittest.TestCase):
    def setUp(self):
        self.node = LiveNode(SOURCE, BUILD)
        self.addCleanup(self.node.__exit__)
        self.assertTrue(self.node.start_daemon(), self.node.log("terraced"))
        self.browser = Browser()
        self.addCleanup(self.browser.__exit__)

    def train(self):
        trainer = self.node.start_trainer(JOB)
        wanted = f'terrace_transfer_bytes_total{{job="{JOB}",direction="h2d",reason="restore"}}'
        self.assertTrue(eventually(lambda: self.node.series().get(wanted, 0) > 0), self.node.log(JOB))
        return trainer

    def open(self):
        self.browser.open(f"http://{self.node.address}/")
        self.browser.until("page.answers.length >= 3")

    def newest(self, plot):
        """The last values that a plot draws, by series."""
        return json.loads(self.browser.value(
            f"JSON.stringify(Object.fromEntries(Chart.getChart('{plot}').data.datasets.map((d) => [d.label, d.data.at(-1).y])))"))

    def test_the_plots_hold_what_metrics_say(self):
        trainer = self.train()
        self.open()
        self.browser.value(f"choose('job:{JOB}')")
        self.browser.until("page.answers.length >= 6")
        trainer.send_signal(signal.SIGSTOP)  # from here on nothing changes
        self.browser.value("new Promise((done) => setTimeout(done, 2500))")
        series = self.node.series()
        for tier, plot in (("hbm", "hbm"), ("ddr", "ddr")):
            shown = self.newest(plot)
            for pool in POOLS:
                self.assertEqual(shown[pool], series[f'terrace_step_tier_bytes{{job="{JOB}",tier="{tier}",pool="{pool}"}}'], (tier, pool))
        self.assertEqual(self.newest("hbm")["lease"], series[f'terrace_lease_bytes{{job="{JOB}",tier="hbm"}}'])
        self.assertGreater(sum(self.newest("hbm")[pool] for pool in POOLS), 0)
        for direction, name in (("d2h", "to DDR"), ("h2d", "to HBM")):
            self.assertEqual(self.newest("link")[name + ", peak"],
                             series[f'terrace_link_peak_bytes_per_second{{job="{JOB}",direction="{direction}"}}'])
            self.assert_rates_add_up("link", name, [direction], "transfer_bytes_total", series)
        for outcome in ("hit", "late", "miss"):
            self.assert_rates_add_up("fetches", outcome, [outcome], "cache_fetches_total", series)
        self.assertEqual(self.browser.value(f"JSON.stringify(page.answers.at(-1).jobs['{JOB}'].steps_total)"),
                         str(int(series[f'terrace_steps_total{{job="{JOB}"}}'])))
        row = self.browser.value("document.querySelector('#jobs tbody tr').innerText.split('\\t')")
        self.assertEqual(row[0], JOB)
        self.assertEqual(self.browser.errors, [])

    def assert_rates_add_up(self, plot, name, labels, metric, series):
        """What the plot draws, added up over time, is what the counter has risen by since the first answer."""
        drawn, first = self.browser.value(
            f"(() => {{ const d = Chart.getChart('{plot}').data.datasets.find((d) => d.label === '{name}').data;"
            "  let sum = 0; for (let i = 1; i < d.length; ++i) sum += d[i].y * (d[i].x - d[i - 1].x);"
            f" return [sum, JSON.stringify(page.answers[0].jobs['{JOB}'].{metric} ?? {{}})]; }})()")

        def below(tree, wanted):
            if not isinstance(tree, dict):
                return 0 if wanted else tree
            return sum(below(part, wanted - {key}) for key, part in tree.items())

        risen = sum(value for key, value in series.items()
                    if key.startswith(f'terrace_{metric}{{job="{JOB}"') and all(f'"{label}"' in key for label in labels))
        risen -= below(json.loads(first), set(labels))
        self.assertAlmostEqual(drawn, risen, delta=1e-6 * max(1, risen), msg=f"{plot}: {name}")
        if name != "late":
            self.assertGreater(risen, 0, f"{plot}: {name}: nothing was drawn")

    def test_light_and_dark_wide_and_narrow(self):
        self.train()
        self.browser.look(1280, 900)
        self.open()
        seen = {}
        for scheme in ("light", "dark"):
            for width in (1280, 390):
                self.browser.look(width, 844, scheme)
                self.browser.value("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
                self.assertLessEqual(self.browser.value("document.documentElement.scrollWidth"), width, "it scrolls sideways")
                narrowest = self.browser.value("Math.min(...[...document.querySelectorAll('.plot:not([hidden]) canvas')].map((c) => c.clientWidth))")
                self.assertGreater(narrowest, 300 if width < 600 else 400)
            seen[scheme] = self.browser.value("[getComputedStyle(document.body).backgroundColor, Chart.getChart('link').data.datasets[0].borderColor]")
            self.assertGreaterEqual(self.browser.value(CONTRAST), 4.5, f"{scheme}: quiet text on its ground")
        self.assertNotEqual(seen["light"][0], seen["dark"][0])
        self.assertNotEqual(seen["light"][1], seen["dark"][1])
        self.assertEqual(self.browser.errors, [])

    def test_the_keyboard_reaches_everything(self):
        self.train()
        self.open()
        reached = []
        for _ in range(20):
            self.browser.press("Tab")
            if self.browser.value("document.activeElement === document.body"):
                break  # past the end
            reached.append(self.browser.value("document.activeElement.id || document.activeElement.textContent.trim()"))
            outline = self.browser.value("getComputedStyle(document.activeElement).outlineStyle")
            self.assertNotEqual(outline, "none", f"{reached[-1]} does not show that it has the focus")
        for wanted in ("scope", "pause", "hbm", "ddr", "link", "fetches", "stalls", "steps", JOB):
            self.assertIn(wanted, reached)
        self.browser.value("document.getElementById('hbm').focus()")
        self.browser.press("ArrowLeft")
        self.assertGreater(self.browser.value("Chart.getChart('hbm').tooltip.getActiveElements().length"), 0)
        self.assertEqual(self.browser.errors, [])

    def test_every_plot_says_in_words_what_it_shows(self):
        self.train()
        self.open()
        words = self.browser.value(
            "[...document.querySelectorAll('.plot:not([hidden]) canvas')].map((c) => ['labelledby', 'describedby']"
            ".map((name) => document.getElementById(c.getAttribute('aria-' + name)).textContent))")
        self.assertEqual(len(words), 6)
        for title, summary in words:
            self.assertTrue(title)
            self.assertRegex(summary, r"\d", title)
        self.assertEqual(self.browser.value("[...document.querySelectorAll('table')].map((t) => t.getAttribute('aria-live')).join()"), "off,off")

    def test_nothing_jumps(self):
        self.train()
        self.open()
        moved = self.browser.value(
            "new Promise((done) => { let sum = 0; new PerformanceObserver((list) => { for (const e of list.getEntries()) sum += e.value; })"
            ".observe({ type: 'layout-shift' }); setTimeout(() => done(sum), 4000); })")
        self.assertLess(moved, 0.01)

    def test_it_asks_nobody_else_and_runs_nothing_else(self):
        self.open()  # on a node without a job
        self.assertEqual({request.split("?")[0] for request in self.browser.requests if not request.startswith("data:")},
                         {f"http://{self.node.address}/", f"http://{self.node.address}/api/v1/now"})
        self.assertEqual(self.browser.errors, [])
        # The policy holds: a script that was not there when the page was made does not run.
        self.browser.value("{ const s = document.createElement('script'); s.textContent = 'window.foreign = 1'; document.body.append(s); }")
        self.assertIsNone(self.browser.value("window.foreign ?? null"))
        self.assertTrue(any("Content Security Policy" in error for error in self.browser.errors), self.browser.errors)

    def test_it_says_that_the_daemon_is_gone_and_goes_on_with_the_next(self):
        self.open()
        self.node._children[0].kill()
        self.browser.until("document.getElementById('state').classList.contains('lost')")
        self.assertIn("No answer", self.browser.value("document.getElementById('state').textContent"))
        self.assertTrue(self.node.start_daemon())
        self.browser.until("!document.getElementById('state').classList.contains('lost')")

    def test_the_answer_has_the_security_headers(self):
        import urllib.request
        with urllib.request.urlopen(f"http://{self.node.address}/") as reply:
            policy = reply.headers["Content-Security-Policy"]
            self.assertEqual(reply.headers["X-Content-Type-Options"], "nosniff")
        self.assertIn("default-src 'none'", policy)
        self.assertNotIn("unsafe", policy)
        self.assertNotIn("http", policy)
        self.assertEqual(get(self.node.address, "/page.js")[0], 404)


# The contrast of quiet text with the card below it, as WCAG defines it.
CONTRAST = """(() => {
  const light = (node, what) => { const [r, g, b] = getComputedStyle(node)[what].match(/[0-9.]+/g).map((v) => v / 255)
    .map((v) => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const [a, b] = [light(document.querySelector('.summary'), 'color'), light(document.querySelector('.plot'), 'backgroundColor')];
  return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
})()"""

if __name__ == "__main__":
    unittest.main()
