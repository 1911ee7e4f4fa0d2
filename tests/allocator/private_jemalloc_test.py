#!/usr/bin/env python3
"""private_jemalloc_test.py LIBRARY: Python's threads, running before ctypes opens the library, use its small blocks."""

import ctypes
import sys
import threading

THREADS, ROUNDS = 8, 400
failures = []


def churn(library, seed):
    live = {}
    for i in range(ROUNDS):
        size = 1 + (seed * 7919 + i * 104729) % 70000
        block = library.late_allocate(size)
        if not block:
            failures.append("no block")
            return
        ctypes.memset(block, seed, size)
        live[block] = size
        if len(live) > 20:
            old, old_size = live.popitem() if i % 2 else (next(iter(live)), None)
            old_size = old_size or live.pop(old)
            if ctypes.string_at(old, old_size) != bytes([seed]) * old_size:
                failures.append("bytes changed")
            library.late_free(old)
    for block in live:
        library.late_free(block)


def main():
    opened, started = threading.Event(), threading.Barrier(THREADS + 1)
    box = []

    def run(seed):
        started.wait()
        opened.wait()
        churn(box[0], seed)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(1, THREADS + 1)]
    for thread in threads:
        thread.start()
    started.wait()
    library = ctypes.CDLL(sys.argv[1])
    library.late_allocate.restype, library.late_allocate.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    library.late_free.argtypes = [ctypes.c_void_p]
    library.late_live.restype = library.late_close.restype = ctypes.c_uint64
    if library.late_open() != 0:
        failures.append("late_open")
    box.append(library)
    opened.set()
    for thread in threads:
        thread.join()
    if library.late_live() != 0:
        failures.append("blocks are left")
    if library.late_close() != 0:
        failures.append("memory was not given back")
    for failure in failures:
        print(failure, file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
