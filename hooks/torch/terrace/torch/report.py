"""What the plugin tells at the end of a process: what was where, what moved, and where time went."""

import sys


def format_bytes(nbytes):
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            break
        value /= 1024
    else:
        unit = "TiB"
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def _memory(figures):
    tensors = ""
    if figures["hbm_peak_bytes"]:
        tensors = (f"tensors held at most {format_bytes(figures['hbm_peak_bytes'])} of "
                   f"{format_bytes(figures['hbm_lease_bytes'])} of HBM, ")
    return (f"{figures['rounds']} rounds of forward and backward, {figures['steps']} updates; {tensors}saved tensors at most "
            f"{format_bytes(figures['held_peak'])}; DDR held at most {format_bytes(figures['ddr_peak_bytes'])}")


def _moved(figures):
    update = figures["state_bytes"], figures["gradient_bytes"], figures["weight_bytes"]
    saved = figures["spilled_bytes"] + figures["restored_bytes"] - sum(update)
    return ("moved, both ways: saved tensors {}, optimizer state {}, gradients {}, weights {}".format(
        *(format_bytes(nbytes) for nbytes in (saved, *update))))


def _waited(figures):
    waits = {"for room": figures["spill_stall_seconds"], "for saved tensors": figures["restore_stall_seconds"],
             "for optimizer state and gradients": figures["optimizer_stall_seconds"],
             "for weights": figures["weights_stall_seconds"]}
    whole = sum(waits.values())
    share = ""
    if figures["step_seconds"] > 0:
        share = f", {100 * whole / figures['step_seconds']:.1f}% of the time of the steps"
    parts = ", ".join(f"{seconds:.3f} s {why}" for why, seconds in waits.items())
    return f"waited {whole:.3f} s{share}: {parts}"


def _larger(figures):
    """All that was in DDR at one time would have fitted: no more than the waits would have been saved."""
    return (f"with {format_bytes(figures['ddr_peak_bytes'])} more of HBM nothing would have had to leave, and nobody would "
            "have waited")


def lines(figures):
    """`figures` is what terrace.torch.figures() gives. Nothing where nothing was there to do."""
    if figures["rounds"] == 0 and figures["spilled_bytes"] == 0:
        return []
    text = [_memory(figures)]
    if figures["spilled_bytes"]:
        text += [_moved(figures), _waited(figures), _larger(figures)]
    if figures["overflow_peak_bytes"]:
        text.append(f"{format_bytes(figures['overflow_peak_bytes'])} found no room in HBM at most and lay in DDR, used over the link, "
                    f"in {figures['overflow_rounds']} rounds")
    if figures["given_way"]:
        text.append(f"gave way to other processes {figures['given_way']} times")
    trouble = {**figures["passed"], **figures["failures"]}
    if trouble:
        text.append("stayed in HBM: " + ", ".join(f"{name} {count}" for name, count in sorted(trouble.items())))
    return [f"terrace: torch: {line}" for line in text]


def say(figures):
    for line in lines(figures):
        print(line, file=sys.stderr)
