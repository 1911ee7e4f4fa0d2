"""The runner without a GPU says of each item why it did not run, and docs/compatibility.md names each with its commands."""

import json
import os
import subprocess
import sys
import unittest
from pathlib import Path
from unittest import mock

import run

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "compatibility.md"


def table():
    """{item: cells} of the document."""
    lines = [line for line in DOCUMENT.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {cells[0]: cells for cells in rows if cells[0] not in ("item", "---", "---|---|---|---")}


class Document(unittest.TestCase):
    def test_it_has_every_item_and_no_other(self):
        self.assertEqual(set(table()), {item.name for item in run.ITEMS})

    def test_commands_and_results_are_those_of_the_runner(self):
        for item in run.ITEMS:
            cells = table()[item.name]
            self.assertEqual(cells[1], f"`{run.shown_command(item, 'plain')}`")
            self.assertEqual(len(cells), 4, "item, command, native, terrace")
            for result in cells[2:]:
                self.assertTrue(result in ("not yet run", "same") or result.startswith(("refused: ", "failed: ", "skipped: ")),
                                f"{item.name}: {result}")

    def test_every_program_is_there_and_compiles(self):
        for item in run.ITEMS:
            source = run.HERE / "programs" / item.program.split()[0]
            self.assertTrue(source.is_file(), source)
            if source.suffix == ".py":
                compile(source.read_text(encoding="utf-8"), str(source), "exec")


class Runner(unittest.TestCase):
    def rows(self, *arguments, path=""):
        ended = subprocess.run([sys.executable, str(run.HERE / "run.py"), *arguments], capture_output=True, text=True,
                               env={**os.environ, "PATH": path}, check=False)
        return ended, [json.loads(line) for line in ended.stdout.splitlines()]

    def test_without_a_gpu_it_says_so_of_each(self):
        ended, rows = self.rows()
        self.assertEqual(ended.returncode, 0, ended.stderr)
        self.assertEqual([(row["item"], row["mode"]) for row in rows],
                         [(item.name, mode) for item in run.ITEMS for mode in run.MODES])
        self.assertEqual({row["outcome"] for row in rows}, {"skipped: no CUDA device"})

    def test_an_item_that_is_not_there_is_refused_in_words(self):
        ended, rows = self.rows("--only", "nothing")
        self.assertEqual((ended.returncode, rows), (2, []))
        self.assertIn('no item "nothing"; there are: torch.cuda.graph; ', ended.stderr)

    def test_outcomes(self):
        """Programs that end in each way, with a `terrace` that runs what stands behind "--"."""
        item = run.Item("x", "x.py")
        cases = {
            ("a\ndone", "a\ndone", 0): "same",
            ("a\ndone", "b\ndone", 0): "differs",
            ("a\ndone", "a", 0): "failed",
            ("a\ndone", "a\ndone", 3): "failed",
            ("a\ndone", "not here", 77): "skipped: not here",
        }
        for (plain, under, code), outcome in cases.items():
            def ended(_, mode, *rest, plain=plain, under=under, code=code):
                return (0 if mode == "plain" else code, (plain if mode == "plain" else under).splitlines(), "", 1.0)

            with mock.patch.object(run, "run", ended), mock.patch.object(run, "why_not", lambda *_: ""):
                rows = run.rows_of(item, None, 1)
            self.assertEqual([row["outcome"] for row in rows], ["same", outcome, outcome])


if __name__ == "__main__":
    unittest.main()
