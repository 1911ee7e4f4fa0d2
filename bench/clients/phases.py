"""Runs a training script and says how long forward, backward and the update took, and what the optimizer keeps.

    python phases.py SCRIPT [ARGUMENTS]

Behind what the script prints comes one JSON line: the medians of the last steps in milliseconds, state_bytes,
peak_bytes (null where nobody knows), and the link's rates in bytes a second (null without a GPU).
"""

import json
import runpy
import statistics
import sys
import time

import torch

marks = []  # (what has ended, when)
optimizers = []
on_gpu = torch.cuda.is_available()


def mark(what):
    if on_gpu:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        marks.append((what, event))
    else:
        marks.append((what, time.perf_counter() * 1e3))


def between(first, second):
    return first.elapsed_time(second) if on_gpu else second - first


def marked(original, before, after, note=None):
    def call(*args, **kwargs):
        mark(before)
        result = original(*args, **kwargs)
        mark(after)
        if note is not None:
            note(args[0])
        return result

    return call


def watch():
    torch.Tensor.backward = marked(torch.Tensor.backward, "forward", "backward")
    init = torch.optim.Optimizer.__init__

    def initialised(optimizer, *args, **kwargs):
        init(optimizer, *args, **kwargs)
        optimizers.append(optimizer)
        optimizer.step = marked(optimizer.step, "before update", "update")

    torch.optim.Optimizer.__init__ = initialised


def times():
    """{phase: median of the later half, in ms}"""
    if on_gpu:
        torch.cuda.synchronize()
    spans = {"forward": [], "backward": [], "update": []}
    for (before, start), (what, end) in zip(marks, marks[1:]):
        if (before, what) in (("update", "forward"), ("forward", "backward"), ("before update", "update")):
            spans[what].append(between(start, end))
    return {what: statistics.median(values[len(values) // 2 :]) if values else 0.0 for what, values in spans.items()}


def rates():
    """Bytes a second to the host, to the device, and of both together, from pinned memory."""
    if not on_gpu:
        return None
    nbytes = 256 << 20
    device = [torch.empty(nbytes, dtype=torch.uint8, device="cuda") for _ in range(2)]
    host = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]

    def seconds(out, back):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(8):
            with torch.cuda.stream(streams[0]):
                if out:
                    host[0].copy_(device[0], non_blocking=True)
            with torch.cuda.stream(streams[1]):
                if back:
                    device[1].copy_(host[1], non_blocking=True)
        torch.cuda.synchronize()
        return (time.perf_counter() - began) / 8

    seconds(True, True)
    return {"d2h": nbytes / seconds(True, False), "h2d": nbytes / seconds(False, True),
            "both": 2 * nbytes / seconds(True, True)}


def main():
    watch()
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
    terrace = sys.modules.get("terrace.torch")
    peak = torch.cuda.max_memory_allocated() if on_gpu else (terrace.figures().get("hbm_peak_bytes") if terrace else None)
    state = sum(value.numel() * value.element_size() for optimizer in optimizers
                for values in optimizer.state_dict()["state"].values() for value in values.values()
                if isinstance(value, torch.Tensor))
    print(json.dumps({"times": times(), "state_bytes": state, "peak_bytes": peak, "rates": rates()}))


if __name__ == "__main__":
    main()
