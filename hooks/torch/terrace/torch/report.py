"""What the plugin tells at the end of a process."""

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


def lines(figures):
    """`figures` is what terrace.torch.figures() gives. Nothing where nothing was there to do."""
    if figures["rounds"] == 0 and figures["spilled_bytes"] == 0:
        return []
    text = [f"terrace: torch: {figures['rounds']} rounds of forward and backward; saved tensors held at most "
            f"{format_bytes(figures['held_peak'])} of HBM, optimizer state moved {format_bytes(figures['state_bytes'])}"]
    text.append(f"terrace: torch: spilled {format_bytes(figures['spilled_bytes'])}, restored "
                f"{format_bytes(figures['restored_bytes'])}, DDR peak {format_bytes(figures['ddr_peak_bytes'])}; "
                f"stalled {figures['spill_stall_seconds']:.3f} s on spills, {figures['restore_stall_seconds']:.3f} s on "
                f"restores, {figures['optimizer_stall_seconds']:.3f} s on optimizer state")
    trouble = {**figures["passed"], **figures["failures"]}
    if trouble:
        text.append("terrace: torch: stayed in HBM: " +
                    ", ".join(f"{name} {count}" for name, count in sorted(trouble.items())))
    return text


def say(figures):
    for line in lines(figures):
        print(line, file=sys.stderr)
