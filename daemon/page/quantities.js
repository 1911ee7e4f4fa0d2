"use strict";
// What the daemon says, as numbers for plots and words for people. Nothing here touches the document.

const kTiers = ["hbm", "peer", "ddr", "nvme"];
const kPools = ["weights", "optimizer", "gradient", "activation", "expert", "comm", "scratch"];
const kStallReasons = ["restore_late", "spill_backpressure", "budget", "daemon", "expert_late", "optimizer_late"];

function words(name) { return name.replaceAll("_", " "); }

function in_units(value, base, units) {
  let at = 0;
  while (Math.abs(value) >= base * 0.9995 && at + 1 < units.length) { value /= base; ++at; }
  const digits = at === 0 || Math.abs(value) >= 99.95 ? 0 : 1;
  return value.toFixed(digits) + "\u00a0" + units[at];
}
const show = {
  bytes: (value) => in_units(value, 1024, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]),
  rate: (value) => in_units(value, 1000, ["B/s", "kB/s", "MB/s", "GB/s", "TB/s"]),
  count: (value) => value < 999_950 ? Math.round(value).toLocaleString("en") : in_units(value / 1000, 1000, ["k", "M", "G"]),
  each_second: (value) => (value > 0 && value < 99.95 ? value.toFixed(1) : show.count(value)) + "/s",
  percent: (value) => (100 * value).toFixed(value < 0.0995 && value > 0 ? 1 : 0) + "\u00a0%",
  seconds: (value) => value === 0 ? "0\u00a0s" : value >= 0.9995 ? value.toFixed(2) + "\u00a0s"
    : value >= 0.9995e-3 ? (value * 1e3).toFixed(1) + "\u00a0ms" : (value * 1e6).toFixed(0) + "\u00a0\u00b5s",
};

// The sum of all numbers below; what is left out is zero.
function total(tree) {
  if (tree === undefined) return 0;
  return typeof tree === "number" ? tree : Object.values(tree).reduce((sum, part) => sum + total(part), 0);
}
function at(tree, ...path) {
  for (const name of path) {
    if (tree === undefined) return 0;
    tree = tree[name];
  }
  return total(tree);
}
// All of one outcome, whatever the kind of site.
function of_outcome(fetches, outcome) {
  return Object.values(fetches ?? {}).reduce((sum, kind) => sum + (kind[outcome] ?? 0), 0);
}

function add_trees(a, b) {
  if (a === undefined) return b;
  if (b === undefined) return a;
  if (typeof a === "number") return a + b;
  const sum = { ...a };
  for (const [name, part] of Object.entries(b)) sum[name] = add_trees(sum[name], part);
  return sum;
}

// Processes on one GPU each state the rate of the one link they share.
function link_of_devices(devices) {
  let links;
  for (const device of Object.values(devices)) {
    const link = {};
    for (const [direction, rate] of Object.entries(device.link_peak_bytes_per_second ?? {}))
      link[direction] = rate / device.processes;
    links = add_trees(links, link);
  }
  return links;
}

// What `scope` ("node", "job:NAME", "gpu:NAME") has counted, and what it holds; undefined where it is not there.
function of_scope(now, scope) {
  if (scope.startsWith("job:")) return now.jobs[scope.slice(4)];
  if (scope.startsWith("gpu:")) {
    const device = now.devices[scope.slice(4)];
    return device && { ...device, link_peak_bytes_per_second: link_of_devices({ device }) };
  }
  let sum = { processes: 0 };
  for (const job of Object.values(now.jobs)) sum = add_trees(sum, job);
  return { ...sum, lease_bytes: now.lease_bytes, link_peak_bytes_per_second: link_of_devices(now.devices) };
}

// What changed between two answers, each second. A counter that has fallen was another process's: nothing is known.
function rate(before, after, seconds, value) {
  if (before === undefined || after === undefined || seconds <= 0) return null;
  const change = value(after) - value(before);
  return change < 0 ? null : change / seconds;
}
function ratio(upper, lower) { return upper === null || !(lower > 0) ? null : upper / lower; }

// The largest value that an axis shows, of which the quarters are round too.
function round_up(value, unit) {
  if (!(value > 0)) return unit === "bytes" ? 1024 : 1;
  const base = unit === "bytes" ? 2 : 10, steps = unit === "bytes" ? [1, 1.5, 2] : [1, 1.2, 1.6, 2, 3, 4, 6, 8, 10];
  const power = base ** Math.floor(Math.log(value) / Math.log(base));
  return (steps.find((step) => step * power >= value * 0.999) ?? base) * power;
}
