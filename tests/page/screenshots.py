#!/usr/bin/env python3
"""Pictures of the daemon's page for docs/images: screenshots.py BUILD FOLDER. It trains for a minute and looks."""

import sys
import time
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(SOURCE / "tests/daemon"), str(SOURCE / "tests/page")]
from browser import Browser  # noqa: E402
from live_node import LiveNode  # noqa: E402

LOOKS = {"page-light.png": (1280, 1000, "light"), "page-dark.png": (1280, 1000, "dark"), "page-phone.png": (390, 844, "light")}


def main(build, folder):
    with LiveNode(SOURCE, Path(build).resolve()) as node, Browser() as browser:
        if not node.start_daemon():
            sys.exit(node.log("terraced"))
        browser.look(*LOOKS["page-light.png"])
        browser.open(f"http://{node.address}/")
        node.start_trainer("pretrain", ("--length", "256", "--batch", "8", "--hbm", "48MiB"))
        time.sleep(75)
        browser.value("choose('job:pretrain')")
        for name, look in LOOKS.items():
            browser.look(*look)
            time.sleep(2)
            (Path(folder) / name).write_bytes(browser.picture())


if __name__ == "__main__":
    main(*sys.argv[1:])
