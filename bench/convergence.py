#!/usr/bin/env python3
"""Shows that training converges, part by part: types, peer, lora, export and, where the trainer has them, images.

--part NAME runs one, --text DIR names a folder with train.txt, heldout.txt and second.txt, --models DIR one with the tiny public
models, --quick takes a few steps of tiny models, --python PROGRAM runs the peers (it must have transformers). Curves are
left as DIR/NAME.json in the folder --keep, for bench/plots/convergence.py. It fails where a part misses its bound.
"""
import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import convergence_text  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = ROOT / "examples" / "moe_trainer" / "configs"
PARTS = ["types", "peer", "lora", "export", "images"]
MODELS = ["hf_kimi_linear", "hf_deepseek_v32", "hf_qwen3_moe"]
# "fp32-ulp": the fp32 run again at a learning rate that is greater by a unit of its last place: how far two runs part that
# rounding alone keeps apart. Its first steps alone, in which curves lie farthest apart.
TYPES = {"fp32": {"train.compute": "fp32"}, "fp32-ulp": {"train.compute": "fp32"}, "bf16": {}, "fp8": {"moe.compute": "fp8"}}
STEPS_OF = {"fp32-ulp": 400}
BOUNDS = {"bf16": 0.01, "fp8": 0.02, "peer": 0.001, "export": 1e-4, "images": 0.85}
# A token whose scores of two experts lie within rounding goes either way, and from there two right trainings part. So the
# batches are those of the first seed whose smallest such distance in transformers' own run is above LEAST_MARGIN, on a text
# that is the same everywhere.
PEER = {"batch": 4, "length": 64, "steps": 200, "seed": 1, "text": ROOT / "LICENSE"}
LEAST_MARGIN = 2e-6
ADAPTERS = {"lora.rank": 16, "lora.targets": ["kda.q", "kda.v", "kda.out", "dsa.q", "dsa.out", "moe.down", "moe.up"]}
# Nats a byte that a caption holds for a reader without its image: 144 of them, 39.5 bytes in the mean.
CAPTION_FLOOR = math.log(144) / 39.5
SMOOTHED = 20  # steps in the running mean that curves are compared by


class PartError(Exception):
    pass


def config_text(path, changes):
    """The file with some of its keys set, each named section.key."""
    text, left, section = [], dict(changes), ""

    def rest(of):
        return [f"{key.split('.')[1]} = {json.dumps(left.pop(key))}" for key in list(left) if key.split(".")[0] == of]

    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            text += rest(section)
            section = line.strip("[]")
        key = f"{section}.{line.split('=')[0].strip()}"
        text.append(f"{line.split('=')[0].strip()} = {json.dumps(left.pop(key))}" if key in left else line)
    text += rest(section)
    for of in sorted({key.split(".")[0] for key in left}):
        text += [f"[{of}]"] + rest(of)
    return "\n".join(text) + "\n"


def rounded(value):
    """Nine digits, which tell every fp32 number from the next: nothing is lost, and files stay small."""
    if isinstance(value, dict):
        return {key: rounded(of) for key, of in value.items()}
    if isinstance(value, list):
        return [rounded(of) for of in value]
    return float(f"{value:.9g}") if isinstance(value, float) else value


class Bench:
    def __init__(self, options, folder):
        self.options, self.folder = options, folder
        self.text = convergence_text.files_in(options.text or convergence_text.make(folder / "text"))
        self.failed = []
        for name, path in self.text.items():
            print(f"convergence: {name}: {path.stat().st_size} bytes, {convergence_text.fingerprint(path)}", file=sys.stderr)

    def row(self, case, metric, value, unit, floor=None, system="terrace"):
        print(json.dumps({"bench": "convergence", "case": case, "system": system, "metric": metric, "value": value,
                          "unit": unit, "floor": floor}), flush=True)

    def bound(self, case, metric, value, most):
        self.row(case, metric, value, "ratio")
        if not value <= most:
            self.failed.append(f"{case}: {metric} is {value:.3g}, at most {most:g} is wanted")

    def keep(self, name, value):
        self.options.keep.mkdir(parents=True, exist_ok=True)
        (self.options.keep / f"{name}.json").write_text(json.dumps(rounded(value)) + "\n", encoding="utf-8")

    def config(self, name, path, changes):
        out = self.folder / f"{name}.toml"
        out.write_text(config_text(path, changes), encoding="utf-8")
        return out

    def train(self, name, arguments):
        report = self.folder / f"{name}.run.json"
        program = self.options.trainer or self.options.build / "bin" / "moe_trainer"
        command = [str(program), "--device", self.options.device, "--no-progress", "--json", str(report), *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise PartError(f"{name}: {(done.stderr.strip() or done.stdout.strip())[-400:]}")
        print(f"convergence: {name}: {done.stdout.strip()}", file=sys.stderr)
        return json.loads(report.read_text(encoding="utf-8"))

    def peer(self, script, arguments):
        device = "cuda" if self.options.device == "cuda" and self.options.peer_device != "cpu" else "cpu"
        command = [self.options.python, str(ROOT / "bench" / "peers" / script), *map(str, arguments), "--device", device]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise PartError(f"{script}: {done.stderr.strip()[-600:]}")
        return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]

    def write_tokens(self, name, source, shape):
        """Every batch of a run of the trainer, a line each."""
        text = source.read_bytes()
        out = self.folder / f"{name}.tokens"
        with out.open("w", encoding="utf-8") as file:
            for step in range(shape["steps"]):
                drawn = [convergence_text.draw(text, shape["length"], shape.get("seed", 1), step * shape["batch"] + i)
                         for i in range(shape["batch"])]
                file.write(json.dumps({"ids": [d[0] for d in drawn], "labels": [d[1] for d in drawn]}) + "\n")
        return out


def smoothed(losses):
    return [sum(losses[max(0, i - SMOOTHED + 1):i + 1]) / min(i + 1, SMOOTHED) for i in range(len(losses))]


def mean_of_last(losses, count=10):
    return sum(losses[-count:]) / len(losses[-count:])


def worst_ratio(losses, reference):
    return max(abs(a - b) / b for a, b in zip(smoothed(losses), smoothed(reference)))


def small_of(bench):
    quick = {"train.batch": 2, "train.length": 64, "train.schedule_steps": 40, "train.warmup_steps": 4,
             "train.compute": "bf16"}
    return (CONFIGS / "tiny.toml", quick, 24) if bench.options.quick else (
        ROOT / "bench" / "convergence" / "small.toml", {}, bench.options.steps)


def learning_rate_of(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    return float(next(line.split("=")[1] for line in lines if line.startswith("learning_rate")))


def types(bench):
    path, changes, steps = small_of(bench)
    curves = {}
    for name in bench.options.types:
        nudged = {"train.learning_rate": learning_rate_of(path) * (1 + 2 ** -23)} if name == "fp32-ulp" else {}
        config = bench.config(f"types-{name}", path, {**changes, **TYPES[name], **nudged})
        more = ["--checkpoint", bench.folder / "base.safetensors"] if name == "bf16" else []
        run = bench.train(f"types-{name}", ["--config", config, "--steps", min(steps, STEPS_OF.get(name, steps)),
                                            "--data", bench.text["train"], "--evaluate", bench.text["heldout"],
                                            "--evaluate-every", max(1, steps // 10), *more])
        curves[name] = {"losses": run["losses"], "evaluations": run["evaluations"], "ms_per_step": run["ms_per_step"]}
        bench.keep(f"types-{name}", curves[name])
        first, last = run["evaluations"][0]["perplexity"], run["evaluations"][-1]["perplexity"]
        bench.row(f"types/{name}", "ms_per_step", run["ms_per_step"], "ms")
        bench.row(f"types/{name}", "heldout_perplexity_first", first, "perplexity")
        bench.row(f"types/{name}", "heldout_perplexity", last, "perplexity")
        if not last < first:
            bench.failed.append(f"types/{name}: the held-out perplexity did not fall")
        if name != "fp32" and "fp32" in curves:
            compare_with_fp32(bench, name, curves)


def compare_with_fp32(bench, name, curves):
    worst = worst_ratio(curves[name]["losses"], curves["fp32"]["losses"])
    if name in BOUNDS:
        bench.bound(f"types/{name}", "loss_to_fp32", worst, BOUNDS[name])
    else:
        bench.row(f"types/{name}", "loss_to_fp32", worst, "ratio")
    there = {one["step"]: one["loss"] for one in curves["fp32"]["evaluations"]}
    apart = [abs(one["loss"] - there[one["step"]]) / there[one["step"]]
             for one in curves[name]["evaluations"] if one["step"] in there]
    bench.row(f"types/{name}", "heldout_loss_to_fp32", max(apart), "ratio")


def peer(bench):
    shape = {**PEER, "steps": 6 if bench.options.quick else PEER["steps"]}
    config = ROOT / "bench" / "convergence" / "peer.toml"
    model = bench.options.models / "hf_kimi_linear"
    ours = bench.train("peer", ["--model", model, "--config", config, "--steps", shape["steps"], "--seed", shape["seed"],
                                "--data", shape["text"]])
    tokens = bench.write_tokens("peer", shape["text"], shape)
    theirs = bench.peer("kimi_training.py", [model, "--tokens", tokens, "--config", config])
    bench.keep("peer", {"terrace": ours["losses"], "transformers": [row["loss"] for row in theirs]})
    worst = max(abs(a - b["loss"]) / b["loss"] for a, b in zip(ours["losses"], theirs))
    bench.bound("peer/kimi_linear", "loss_to_transformers", worst, BOUNDS["peer"])
    bench.row("peer/kimi_linear", "loss_last", ours["losses"][-1], "nats")
    bench.row("peer/kimi_linear", "loss_last", theirs[-1]["loss"], "nats", system="transformers")
    margin = min(row["margin"] for row in theirs)
    bench.row("peer/kimi_linear", "smallest_routing_margin", margin, "score", system="transformers")
    if margin < LEAST_MARGIN:
        bench.failed.append(f"peer/kimi_linear: the smallest routing margin is {margin:.2g}, within rounding: another seed is needed")


def lora(bench):
    path, changes, steps = small_of(bench)
    base = bench.folder / "base.safetensors"
    if not base.is_file():
        config = bench.config("lora-base", path, changes)
        bench.train("lora-base", ["--config", config, "--steps", steps, "--data", bench.text["train"], "--checkpoint", base])
    config = bench.config("lora", path, {**changes, **ADAPTERS, "train.warmup_steps": 4})
    steps = min(steps, 300)
    run = bench.train("lora", ["--config", config, "--base", base, "--steps", steps, "--data", bench.text["second"],
                               "--evaluate", bench.text["second"], "--evaluate-every", max(1, steps // 10)])
    bench.keep("lora", {"losses": run["losses"], "evaluations": run["evaluations"],
                        "base": [run["base_fingerprint"], run["base_fingerprint_after"]]})
    first, last = run["evaluations"][0]["loss"], run["evaluations"][-1]["loss"]
    bench.bound("lora", "loss_after_to_before", last / first, 1.0 if bench.options.quick else 0.99)
    if run["base_fingerprint"] != run["base_fingerprint_after"]:
        bench.failed.append("lora: the base was changed")


def export(bench):
    # Read back on sequences no longer than an indexer's choice: rectified scores are often equal, and of equal ones
    # transformers takes others than the trainer does. `moe_trainer parity` compares longer ones, by one rule.
    shape = {"batch": 16, "length": 16, "steps": 1}
    steps = 5 if bench.options.quick else 50
    config = ROOT / "bench" / "convergence" / "peer.toml"
    for name in MODELS:
        out = bench.folder / f"export-{name}"
        bench.train(f"export-{name}", ["--model", bench.options.models / name, "--config", config, "--steps", steps,
                                       "--data", bench.text["train"], "--export", out])
        again = bench.train(f"export-{name}-read", ["--model", out, "--config", config, "--steps", 1, "--batch", 16, "--length", 16,
                                                    "--data", bench.text["heldout"]])
        tokens = bench.write_tokens(f"export-{name}", bench.text["heldout"], shape)
        theirs = bench.peer("export_check.py", [out, "--tokens", tokens])[-1]
        bench.bound(f"export/{name}", "loss_error", abs(again["losses"][0] - theirs["loss"]) / theirs["loss"], BOUNDS["export"])
        if theirs["missing"]:
            bench.failed.append(f"export/{name}: transformers misses {theirs['missing'][0]}")


def images(bench):
    path = CONFIGS / "images.toml"
    steps = 12 if bench.options.quick else 300
    curves = {}
    for name, content in (("images", "pixels"), ("blank", "blank")):
        config = bench.config(f"images-{name}", path, {"images.content": content})
        curves[name] = bench.train(f"images-{name}", ["--config", config, "--steps", steps])["losses"]
        bench.row("images", f"loss_last_{content}", mean_of_last(curves[name]), "nats", floor=CAPTION_FLOOR if name == "blank" else None)
    bench.keep("images", curves)
    ratio = mean_of_last(curves["images"]) / mean_of_last(curves["blank"])
    if bench.options.quick:
        bench.row("images", "loss_to_blank", ratio, "ratio")
    else:
        bench.bound("images", "loss_to_blank", ratio, BOUNDS["images"])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", type=Path)
    parser.add_argument("--trainer", type=Path, help="the program itself, in the build's place")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--part", choices=PARTS, action="append")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--models", type=Path, default=Path(os.environ.get("TERRACE_GOLDEN_DIR", "/nowhere")) / "models")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--peer-device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--types", nargs="+", choices=list(TYPES), default=list(TYPES))
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--keep", type=Path, default=ROOT / "docs" / "plots" / "data")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(options, Path(folder))
        for part in options.part or PARTS:
            try:
                globals()[part](bench)
            except PartError as error:
                bench.failed.append(str(error))
    for line in bench.failed:
        print(f"convergence: {line}", file=sys.stderr)
    return 1 if bench.failed else 0


if __name__ == "__main__":
    sys.exit(main())
