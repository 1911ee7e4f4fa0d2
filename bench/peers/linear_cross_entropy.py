#!/usr/bin/env python3
"""The loss over a large vocabulary as a user would get it elsewhere: started by `./dev bench kernels --peers`.

Plain PyTorch (a bf16 linear layer and cross_entropy), and where they can be imported cut_cross_entropy (as it comes,
which leaves small gradients out, and its exact forms) and liger_kernel. Names of cases: bench/kernels_loss.cpp.
Rows of a case: seconds; scratch_bytes, the peak of PyTorch's allocator beyond inputs and the two gradients; and of
forward_backward, error_of_loss and error_of_d_weight, relative, against float32 sums over a few words of the vocabulary.
"""

import argparse
import inspect
import json
import sys

SHAPES = ((16384, 4096, 163840), (4096, 4096, 1 << 20), (4096, 2048, 32000))
SAMPLES = 5
CHECKED_WORDS = 512
TOKENS_AT_ONCE = 256


def say(text):
    print(f"peers: {text}", file=sys.stderr)


def print_row(case, system, metric, value, unit):
    row = {"bench": "kernels", "case": case, "system": system, "metric": metric, "value": value, "unit": unit, "floor": None}
    print(json.dumps(row), flush=True)


def plain(torch):
    functional = torch.nn.functional
    return {"torch": lambda hidden, weight, labels: functional.cross_entropy(functional.linear(hidden, weight), labels)}


def cut_cross_entropy(torch):
    del torch
    from cut_cross_entropy import linear_cross_entropy as function

    systems = {"cut_cross_entropy": lambda *arrays: function(*arrays)}
    if "filter_eps" in inspect.signature(function).parameters:
        systems["cut_cross_entropy_exact"] = lambda *arrays: function(*arrays, filter_eps=None)
    for name in ("cce_exact", "cce_kahan_full_c"):  # presets of later releases
        systems[name] = lambda *arrays, name=name: function(*arrays, impl=name)
    return systems


def liger(torch):
    del torch
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss = LigerFusedLinearCrossEntropyLoss()
    return {"liger": lambda hidden, weight, labels: loss(weight, hidden, labels)}


class Reference:
    """The loss, and the gradient of the first words' weights, with float32 sums of bf16 products."""

    def __init__(self, torch, hidden, weight, labels):
        words = weight[:CHECKED_WORDS].float()
        self.d_words = torch.zeros_like(words)
        total = 0.0
        for begin in range(0, len(hidden), TOKENS_AT_ONCE):
            rows = hidden[begin:begin + TOKENS_AT_ONCE]
            label = labels[begin:begin + TOKENS_AT_ONCE]
            lse = self.log_sum_exp(torch, rows, weight)
            of_label = (rows.float() * weight[label].float()).sum(1)
            total += (lse - of_label).double().sum().item()
            share = torch.exp(rows.float() @ words.T - lse[:, None])
            share[(label < CHECKED_WORDS).nonzero().flatten(), label[label < CHECKED_WORDS]] -= 1
            self.d_words += share.T @ rows.float()
        self.loss = total / len(hidden)
        self.d_words /= len(hidden)

    @staticmethod
    def log_sum_exp(torch, rows, weight):
        step = 1 << 15
        parts = [torch.logsumexp(rows.float() @ weight[word:word + step].float().T, dim=1)
                 for word in range(0, len(weight), step)]
        return torch.logsumexp(torch.stack(parts), dim=0)

    def errors(self, loss, d_weight):
        difference = (d_weight[:CHECKED_WORDS].float() - self.d_words).norm() / self.d_words.norm()
        return abs(loss / self.loss - 1), difference.item()


class Measurement:
    def __init__(self, torch, shape):
        tokens, width, vocabulary = shape
        self.torch = torch
        self.name = "x".join(map(str, shape))
        torch.manual_seed(1)
        self.hidden = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16).requires_grad_()
        self.weight = torch.empty(vocabulary, width, device="cuda", dtype=torch.bfloat16).normal_(0, 0.02).requires_grad_()
        self.labels = torch.randint(vocabulary, (tokens,), device="cuda")
        with torch.no_grad():
            self.reference = Reference(torch, self.hidden, self.weight, self.labels)
        torch.cuda.empty_cache()

    def forward(self, loss_of):
        with self.torch.no_grad():
            loss_of(self.hidden, self.weight, self.labels)

    def forward_backward(self, loss_of):
        self.hidden.grad = self.weight.grad = None
        loss = loss_of(self.hidden, self.weight, self.labels)
        loss.backward()
        return loss

    def seconds(self, launch):
        begin, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        launch()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    def measure(self, way, system, launch, gradient_bytes):
        case = f"loss/{way}/{self.name}"
        cuda = self.torch.cuda
        self.hidden.grad = self.weight.grad = None
        for _ in range(2):
            launch()  # compiles, tunes, takes memory
        self.hidden.grad = self.weight.grad = None
        cuda.synchronize()
        before = cuda.memory_allocated()
        cuda.reset_peak_memory_stats()
        samples = sorted(self.seconds(launch) for _ in range(SAMPLES))
        print_row(case, system, "seconds", samples[SAMPLES // 2], "s")
        print_row(case, system, "scratch_bytes", cuda.max_memory_allocated() - before - gradient_bytes, "B")
        return case

    def run(self, system, loss_of):
        try:
            self.measure("forward", system, lambda: self.forward(loss_of), 0)
            gradients = 2 * (self.hidden.numel() + self.weight.numel())
            case = self.measure("forward_backward", system, lambda: self.forward_backward(loss_of), gradients)
            loss = self.forward_backward(loss_of).item()
            error_of_loss, error_of_d_weight = self.reference.errors(loss, self.weight.grad)
            print_row(case, system, "error_of_loss", error_of_loss, "relative")
            print_row(case, system, "error_of_d_weight", error_of_d_weight, "relative")
        except NotImplementedError as error:
            say(f"loss: {system}: this release has no such form ({error})")
        except Exception as error:  # noqa: BLE001  one peer that fails does not take the others along
            say(f"loss/{self.name}: {system}: {type(error).__name__}: {(str(error) or 'failed').splitlines()[0]}")
        finally:
            self.hidden.grad = self.weight.grad = None
            self.torch.cuda.empty_cache()


def systems_of(torch):
    systems = {}
    for peer in (plain, cut_cross_entropy, liger):
        try:
            systems.update(peer(torch))
        except ImportError as error:
            say(f"loss: {peer.__name__} cannot be imported ({error}): not measured")
    return systems


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--device", default="auto", choices=["auto", "cuda", "emulated"])
    parser.add_argument("--build", help="not needed")
    options = parser.parse_args()
    try:
        import torch
    except ImportError as error:
        say(f"PyTorch cannot be imported ({error}): no peers are measured")
        return 0
    if options.device == "emulated" or not torch.cuda.is_available():
        say("peers run on CUDA alone: none are measured")
        return 0
    systems = systems_of(torch)
    for shape in SHAPES:
        measurement = Measurement(torch, shape)
        for system, loss_of in systems.items():
            measurement.run(system, loss_of)
        del measurement
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
