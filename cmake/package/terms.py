#!/usr/bin/env python3
"""terms.py LICENSE FILE...: the package's copyright file: Terrace's own licence, then the terms of what is compiled in."""

import sys
from pathlib import Path


def subject(path):
    # /usr/share/doc/PACKAGE/copyright names its subject by its folder; jemalloc's COPYING lies in its build folder.
    return "jemalloc" if path.name == "COPYING" else path.parent.name


def main():
    licence, *others = map(Path, sys.argv[1:])
    print("Terrace is under the Apache License, version 2.0; on Debian its text is in /usr/share/common-licenses/Apache-2.0.")
    print("Its programs and libraries contain code of other projects, whose terms follow it.\n")
    print(licence.read_text(encoding="utf-8").strip("\n"))
    for path in others:
        print(f"\n\n---------------------------------------- {subject(path)}\n")
        print(path.read_text(encoding="utf-8").strip("\n"))


if __name__ == "__main__":
    main()
