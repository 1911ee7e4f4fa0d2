#!/usr/bin/env python3
"""A lower bound of the step time that any placement of site outputs can reach, by linear programming.

Reads what a training run measured (the field `swapcore_snapshot` of its --json file) and shares no code with the
solver. Relaxed where the solver is not: parts of an output may be kept, the link may be used to the full in every
moment, and an output holds no HBM in the moment in which it leaves or returns. Needs scipy (Debian:
python3-scipy).

  swapcore_bound.py RESULT.json [--hbm-budget BYTES]... [--case NAME]

--hbm-budget (several times: one row each) takes the place of the run's own.
"""
import argparse
import json
import sys

try:
    import numpy
    from scipy.optimize import linprog
    from scipy.sparse import coo_matrix
except ImportError as missing:
    sys.exit(f"swapcore_bound: {missing}; install scipy (Debian: python3-scipy)")


class Program:
    """minimise cost x, with rows of coefficients at most (or equal to) a limit"""

    def __init__(self):
        self.cost, self.bounds = [], []
        self.rows = {"most": [], "equal": []}
        self.limits = {"most": [], "equal": []}

    def variable(self, cost=0.0, most=None):
        self.cost.append(cost)
        self.bounds.append((0, most))
        return len(self.cost) - 1

    def add(self, kind, terms, limit):
        self.rows[kind].append(terms)
        self.limits[kind].append(limit)

    def matrix(self, kind):
        if not self.rows[kind]:
            return None, None
        at = [(i, j, v) for i, row in enumerate(self.rows[kind]) for j, v in row]
        i, j, v = zip(*at) if at else ((), (), ())
        shape = (len(self.rows[kind]), len(self.cost))
        return coo_matrix((v, (i, j)), shape=shape).tocsr(), numpy.array(self.limits[kind])

    def solve(self):
        most, most_limits = self.matrix("most")
        equal, equal_limits = self.matrix("equal")
        found = linprog(self.cost, A_ub=most, b_ub=most_limits, A_eq=equal, b_eq=equal_limits, bounds=self.bounds,
                        method="highs")
        if not found.success:
            sys.exit(f"swapcore_bound: no solution: {found.message}")
        return found.fun


MIB = float(1 << 20)  # bytes are counted in MiB and time in milliseconds: numbers of like size


def bound(snapshot, hbm_budget):
    """seconds of a step, at least"""
    layers, head = snapshot["layers"], snapshot["head"]
    n = len(layers)
    last = 2 * n
    lp = Program()
    sites = [s for s in snapshot["sites"] if s["bytes"] > 0]
    kept, gone = {}, {}  # by site: the share that stays in HBM, the share that travels
    h2d, d2h, both = (snapshot[k] / MIB / 1e3 for k in
                      ("h2d_bytes_per_second", "d2h_bytes_per_second", "both_bytes_per_second"))
    for i, site in enumerate(sites):
        kept[i] = lp.variable(most=1)
        gone[i] = lp.variable(most=1 if h2d > 0 and d2h > 0 else 0)
        lp.add("most", [(kept[i], 1), (gone[i], 1)], 1)
    of_layer = [[i for i, s in enumerate(sites) if s["layer"] == l] for l in range(n)]

    # Windows: forward and head as measured; backward less what is not computed again, and waiting as it likes.
    window, fixed = {}, {}
    for m in range(n + 1):
        fixed[m] = (layers[m] if m < n else head)["forward_seconds"] * 1e3
    for l in range(n):
        window[last - l] = w = lp.variable(cost=1)
        saved = [(v[i], sites[i]["recompute_seconds"] * 1e3) for i in of_layer[l] for v in (kept, gone)]
        lp.add("most", [(w, -1)] + [(v, -s) for v, s in saved], -layers[l]["backward_seconds"] * 1e3)

    # What leaves and returns in each moment, from the layer's own forward to its own backward.
    out, back = {}, {}
    size = {i: s["bytes"] / MIB for i, s in enumerate(sites)}
    link = {i: s.get("travel_bytes", s["bytes"]) / MIB for i, s in enumerate(sites)}  # on the link and in DDR
    for l in range(n):
        if not of_layer[l]:
            continue
        own = last - l
        for m in range(l, own + 1):
            out[l, m] = lp.variable()
        for m in range(n, own + 1):
            back[l, m] = lp.variable()
        travelling = [(gone[i], -link[i]) for i in of_layer[l]]
        lp.add("equal", [(out[l, m], 1) for m in range(l, own + 1)] + travelling, 0)
        lp.add("equal", [(back[l, m], 1) for m in range(n, own + 1)] + travelling, 0)
        for m in range(n, own + 1):  # nothing returns before it has left
            lp.add("most", [(back[l, k], 1) for k in range(n, m + 1)] + [(out[l, k], -1) for k in range(l, m + 1)], 0)

    for m in range(last + 1):
        leaving = [(v, 1) for (l, k), v in out.items() if k == m]
        coming = [(v, 1) for (l, k), v in back.items() if k == m]
        for terms, rate in ((leaving, d2h), (coming, h2d), (leaving + coming, both)):
            if not terms or rate <= 0:
                continue
            if m in fixed:
                lp.add("most", terms, rate * fixed[m])
            else:
                lp.add("most", terms + [(window[m], -rate)], 0)

        # HBM: what stays and what has not left or is back, of layers whose backward has not come.
        place = layers[m] if m < n else head if m == n else layers[last - m]
        base = place["forward_peak" if m <= n else "backward_peak"]
        terms = []
        for l in range(min(m, n) if m <= n else last - m):
            for i in of_layer[l]:
                terms += [(kept[i], size[i]), (gone[i], link[i])]
            terms += [(out[l, k], -1) for k in range(l, m + 1) if (l, k) in out]
            terms += [(back[l, k], 1) for k in range(n, m) if (l, k) in back]
        if terms:
            lp.add("most", terms, max(0, hbm_budget - base) / MIB)
    lp.add("most", [(kept[i], size[i]) for i in kept], snapshot["hbm_cache_limit"] / MIB)
    lp.add("most", [(gone[i], link[i]) for i in gone], snapshot["ddr_cache_limit"] / MIB)

    micro_batch = sum(fixed.values()) / 1e3 + (lp.solve() / 1e3 if n else 0)
    return snapshot["other_seconds"] + snapshot["micro_batches"] * micro_batch


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("result", help="what the trainer wrote with --json")
    parser.add_argument("--hbm-budget", type=int, action="append", help="bytes; the measured run's where absent")
    parser.add_argument("--case", default="bound")
    options = parser.parse_args()
    try:
        with open(options.result, encoding="utf-8") as file:
            result = json.load(file)
    except (OSError, ValueError) as problem:
        sys.exit(f"swapcore_bound: {options.result}: {problem}")
    snapshot = result.get("swapcore_snapshot")
    if snapshot is None:
        sys.exit(f"swapcore_bound: {options.result} has no swapcore_snapshot: give the --json file of a run of three "
                 "steps or more with recompute = \"full\" and swapcore.mode = \"auto\"")
    for budget in options.hbm_budget or [snapshot["hbm_budget"]]:
        print(json.dumps({"bench": "swapcore_bound", "case": options.case if not options.hbm_budget else
                          f"{options.case}@{budget}", "system": "bound", "metric": "ms_per_step",
                          "value": bound(snapshot, budget) * 1e3, "unit": "ms", "floor": None}))


if __name__ == "__main__":
    main()
