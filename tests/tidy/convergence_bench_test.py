#!/usr/bin/env python3
"""bench/convergence.py and its plots: what makes a part fail, with programs that stand in for the trainer and for transformers."""
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))
import convergence_text  # noqa: E402

TRAINER = """#!/usr/bin/env python3
import json, math, os, sys, tomllib
options = dict(zip(sys.argv[1:], sys.argv[2:]))
config = tomllib.load(open(options["--config"], "rb"))
kind = "fp8" if config.get("moe", {}).get("compute") == "fp8" else config["train"].get("compute", "fp32")
steps = int(options["--steps"])
json.dump({"steps": steps, "rate": config["train"]["learning_rate"]}, open(os.path.join(os.environ["FAKE_SEEN"], f"{kind}-{steps}"), "w"))
if "--checkpoint" in options:
    open(options["--checkpoint"], "a").close()
factor = float(os.environ.get("FAKE_" + kind.upper(), "1"))
held = [5.5, 5.5 if os.environ.get("FAKE_FLAT") == kind else 1.2]
json.dump({"losses": [(5 - i / steps) * factor for i in range(steps)], "ms_per_step": 1.0,
           "evaluations": [{"step": at, "loss": loss, "perplexity": math.exp(loss)} for at, loss in zip((0, steps), held)]},
          open(options["--json"], "w"))
"""
TRANSFORMERS = """#!/usr/bin/env python3
import json, os, sys
lines = open(sys.argv[sys.argv.index("--tokens") + 1]).readlines()
for i, line in enumerate(lines):
    assert len(json.loads(line)["ids"]) == 4 and len(json.loads(line)["labels"][0]) == 64
    print(json.dumps({"step": i + 1, "loss": 5 - i / len(lines), "margin": float(os.environ.get("FAKE_MARGIN", "3e-6"))}))
"""


class Verdicts(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        (self.folder / "seen").mkdir()
        (self.folder / "text").mkdir()
        for name in ("train", "heldout", "second"):
            (self.folder / "text" / f"{name}.txt").write_text("some text " * 100, encoding="utf-8")
        for name, source in (("trainer", TRAINER), ("transformers", TRANSFORMERS)):
            (self.folder / name).write_text(source, encoding="utf-8")
            (self.folder / name).chmod(0o755)

    def run_bench(self, *more, **fakes):
        at = {name: str(self.folder / name) for name in ("trainer", "transformers", "text", "keep", "seen")}
        command = [sys.executable, str(ROOT / "bench" / "convergence.py"), "--trainer", at["trainer"], "--device", "emulated",
                   "--python", at["transformers"], "--models", str(self.folder), "--text", at["text"], "--keep", at["keep"], *more]
        answer = subprocess.run(command, capture_output=True, text=True, check=False,
                                env={**os.environ, "FAKE_SEEN": at["seen"], **fakes})
        rows = {(row["case"], row["metric"]): row["value"] for row in map(json.loads, answer.stdout.splitlines())
                if row["system"] == "terrace" or "margin" in row["metric"]}
        return answer, rows

    def test_types_within_their_bounds(self):
        answer, rows = self.run_bench("--part", "types", FAKE_BF16="1.009", FAKE_FP8="1.019")
        self.assertEqual(answer.returncode, 0, answer.stderr)
        self.assertAlmostEqual(rows["types/bf16", "loss_to_fp32"], 0.009)
        self.assertAlmostEqual(rows["types/fp8", "loss_to_fp32"], 0.019)
        self.assertEqual(rows["types/fp32-ulp", "heldout_loss_to_fp32"], 0)

    def test_the_second_fp32_run_differs_by_a_unit_of_the_last_place(self):
        self.run_bench("--part", "types")
        rates = {name: json.loads((self.folder / "seen" / name).read_text(encoding="utf-8"))["rate"] for name in ("fp32-1000", "fp32-400")}
        self.assertEqual(rates["fp32-400"], rates["fp32-1000"] * (1 + 2 ** -23))

    def test_a_curve_too_far_away_fails(self):
        for name, factor in (("bf16", "1.011"), ("fp8", "0.979")):
            answer, _ = self.run_bench("--part", "types", **{f"FAKE_{name.upper()}": factor})
            self.assertEqual(answer.returncode, 1)
            self.assertIn(f"types/{name}: loss_to_fp32", answer.stderr)

    def test_held_out_text_must_become_easier(self):
        answer, _ = self.run_bench("--part", "types", FAKE_FLAT="fp8")
        self.assertEqual(answer.returncode, 1)
        self.assertIn("types/fp8: the held-out perplexity did not fall", answer.stderr)

    def test_peer(self):
        answer, rows = self.run_bench("--part", "peer", FAKE_FP32="1.0009")
        self.assertEqual(answer.returncode, 0, answer.stderr)
        self.assertAlmostEqual(rows["peer/kimi_linear", "loss_to_transformers"], 0.0009)
        self.assertEqual(rows["peer/kimi_linear", "smallest_routing_margin"], 3e-6)
        kept = json.loads((self.folder / "keep" / "peer.json").read_text(encoding="utf-8"))
        self.assertEqual([len(curve) for curve in kept.values()], [200, 200])
        answer, _ = self.run_bench("--part", "peer", FAKE_FP32="1.0011")
        self.assertEqual(answer.returncode, 1)
        self.assertIn("loss_to_transformers is 0.0011", answer.stderr)

    def test_a_choice_within_rounding_is_told(self):
        answer, _ = self.run_bench("--part", "peer", FAKE_MARGIN="5e-7")
        self.assertEqual(answer.returncode, 1)
        self.assertIn("smallest routing margin is 5e-07", answer.stderr)


class Text(unittest.TestCase):
    def test_tables_of_characters_are_no_prose(self):
        self.assertTrue(convergence_text.is_table("encodings/cp1250.py"))
        with tempfile.TemporaryDirectory() as folder:
            texts = convergence_text.files_in(convergence_text.make(Path(folder)))
            self.assertNotIn(b"LATIN SMALL LETTER S WITH ACUTE\n", texts["train"].read_bytes())


class Plots(unittest.TestCase):
    def draw(self, *folders):
        return subprocess.run([sys.executable, str(ROOT / "bench" / "plots" / "convergence.py"), *map(str, folders)],
                              capture_output=True, text=True, check=False)

    def test_a_folder_without_curves_is_answered_in_a_line(self):
        with tempfile.TemporaryDirectory() as folder:
            answer = self.draw(folder, folder)
            self.assertEqual(answer.returncode, 1)
            self.assertEqual(len(answer.stderr.splitlines()), 1, answer.stderr)
            self.assertIn("./dev bench convergence --keep", answer.stderr)

    @unittest.skipIf(importlib.util.find_spec("matplotlib") is None, "needs matplotlib")
    def test_draws_what_is_kept_with_text_as_text(self):
        with tempfile.TemporaryDirectory() as folder:
            answer = self.draw(ROOT / "docs" / "plots" / "data", folder)
            self.assertEqual(answer.returncode, 0, answer.stderr)
            drawn = {path.stem: path.read_text(encoding="utf-8") for path in Path(folder).glob("*.svg")}
            self.assertEqual(set(drawn), {"types", "heldout", "peer", "images", "lora"})
            self.assertIn(">transformers</text>", drawn["peer"])


if __name__ == "__main__":
    unittest.main()
