// The plots: which series each shows and in what words, and how Chart.js draws them. A series' value is computed from
// two answers in a row, `before` and `now`, of the scope that is shown, `seconds` apart; null where nothing is known.

// Seconds that the plots show: the shortest that holds all there is.
const kSpans = [60, 120, 300];
const kLongest = kSpans.at(-1);

const by_pool = (tier) => kPools.map((pool, i) => ({
  name: pool,
  colour: ["blue", "purple", "green", "orange", "sky", "red", "grey"][i],
  fill: true,
  value: ({ now }) => at(held(now), tier, pool),
}));
// Of a job with steps what the fullest moment of the last one held: between two steps little is live.
const held = (counted) => total(counted?.step_tier_bytes) > 0 ? counted.step_tier_bytes : counted?.tier_bytes;
const limit = (name, value) => ({ name, colour: "quiet", dashed: true, value });
const outcomes = [["hit", "blue"], ["late", "orange"], ["miss", "grey"]].map(([name, colour]) => ({
  name, colour, fill: true,
  value: ({ before, now, seconds }) => rate(before, now, seconds, (counted) => of_outcome(counted.cache_fetches_total, name)),
}));
const link = (name, direction, colour) => [
  { name, colour,
    value: ({ before, now, seconds }) => rate(before, now, seconds, (counted) => at(counted, "transfer_bytes_total", direction)) },
  { name: name + ", peak", colour, dashed: true,
    value: ({ now }) => at(now, "link_peak_bytes_per_second", direction) || null },
];
// Seconds of stalls a second, of each process.
const stall = (reason) => ({ before, now, seconds }) =>
  ratio(rate(before, now, seconds, (counted) => at(counted, "stall_seconds_total", reason)), now?.processes);
// Of the steps that ended in between; where none did, the plot keeps silent.
function per_step({ before, now }, time, steps) {
  if (before === undefined || now === undefined) return null;
  const spent = time(now) - time(before);
  return spent < 0 ? null : ratio(spent, steps(now) - steps(before));
}
function planned_step(pair, estimate) {
  return per_step(pair, (counted) => at(counted, "planned_step_seconds_total", estimate), (counted) => at(counted, "planned_steps_total"));
}

const kPlots = [
  { id: "hbm", title: "HBM", unit: "bytes", stacked: true,
    series: [...by_pool("hbm"), limit("mapped", ({ now }) => at(now, "tier_mapped_bytes", "hbm") || null),
      { ...limit("lease", ({ now }) => at(now, "lease_bytes", "hbm")), colour: "ink" }],
    say: (value) => `${show.bytes(value.sum)} live of ${show.bytes(value.lease)} leased.` },
  { id: "ddr", title: "Pinned DDR", unit: "bytes", stacked: true,
    series: [...by_pool("ddr"), limit("pinned", ({ now }) => at(now, "tier_mapped_bytes", "ddr"))],
    say: (value) => `${show.bytes(value.sum)} live of ${show.bytes(value.pinned)} pinned.` },
  { id: "far", title: "Peer HBM and NVMe", unit: "bytes", stacked: true, only_if_any: true,
    series: [["peer", "sky"], ["nvme", "purple"]].map(([tier, colour]) => (
      { name: tier, colour, fill: true, value: ({ now }) => at(now, "tier_bytes", tier) })),
    say: (value) => `${show.bytes(value.peer)} with peers, ${show.bytes(value.nvme)} in files.` },
  { id: "link", title: "Link traffic", unit: "rate",
    series: [...link("to DDR", "d2h", "orange"), ...link("to HBM", "h2d", "blue")],
    say: (value) => ["to DDR", "to HBM"].map((way) => {
      const share = ratio(value[way], value[way + ", peak"]);
      return `${show.rate(value[way] ?? 0)} ${way}` + (share === null ? "" : `, ${show.percent(share)} of the peak`);
    }).join("; ") + "." },
  { id: "fetches", title: "Fetches of cached outputs", unit: "each_second", stacked: true, series: outcomes,
    say: (value) => value.sum > 0
      ? `${show.percent((value.hit + value.late) / value.sum)} found; ${show.percent(value.late / value.sum)} late.`
      : "None asked for." },
  { id: "stalls", title: "Stalls", unit: "percent", stacked: true,
    series: kStallReasons.map((reason, i) => ({
      name: words(reason), colour: ["blue", "orange", "red", "grey", "sky", "purple"][i], fill: true, value: stall(reason) })),
    say: (value) => `A process waits for Terrace ${show.percent(value.sum)} of the time.` },
  { id: "steps", title: "Step time", unit: "seconds",
    series: [
      // On the device where a plan times it, as the plan predicts it; else as the host sees it.
      { name: "measured", colour: "blue", gaps: true, value: (pair) => planned_step(pair, "measured") ?? per_step(pair,
        (counted) => at(counted, "step_seconds_total"), (counted) => at(counted, "steps_total")) },
      { name: "predicted", colour: "orange", dashed: true, gaps: true, value: (pair) => planned_step(pair, "predicted") },
    ],
    say: (value) => value.measured === null ? "No step has ended." : `${show.seconds(value.measured)} a step` +
      (value.predicted === null ? "; no plan is in force." : `, ${show.seconds(value.predicted)} by the plan.`) },
];

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}
function set_text(node, text) { if (node.textContent !== text) node.textContent = text; }
function colour(name) { return getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim(); }

// One plot with its legend and its sentence. `history` is the page's: [{time, values by plot and series}].
class Plot {
  constructor(spec, parent) {
    this.spec = spec;
    this.top = 0;
    this.canvas = element("canvas", { id: spec.id, role: "img", tabindex: "0",
      "aria-labelledby": `${spec.id}-title`, "aria-describedby": `${spec.id}-summary` });
    this.summary = element("p", { class: "summary", id: `${spec.id}-summary` });
    this.figures = spec.series.map(() => element("span", { class: "figure" }));
    this.keys = spec.series.map((series) => element("span", { class: series.dashed ? "key dashed" : "key", "aria-hidden": "true" }));
    const rows = spec.series.map((series, i) =>
      element("li", {}, this.keys[i], element("span", { class: "name" }, series.name), this.figures[i]));
    this.section = element("section", { class: "plot", "aria-labelledby": `${spec.id}-title` },
      element("h2", { id: `${spec.id}-title` }, spec.title), element("div", { class: "canvas" }, this.canvas),
      element("ul", { class: "legend" }, ...rows), this.summary);
    this.section.hidden = spec.only_if_any === true;
    parent.append(this.section);
    this.chart = new Chart(this.canvas, { type: "line", data: { datasets: this.datasets() }, options: this.options() });
    this.canvas.addEventListener("keydown", (event) => this.walk(event));
    this.canvas.addEventListener("blur", () => this.point(-1));
    this.dress();
  }

  datasets() {
    return this.spec.series.map((series, i) => ({
      label: series.name, data: [], pointRadius: 0, pointHitRadius: 8, borderWidth: series.fill ? 1 : 2, spanGaps: series.gaps === true,
      borderDash: series.dashed ? [5, 5] : [], borderDashOffset: 5 * i,  // two on one line take turns
      stack: series.fill ? "filled" : `line ${i}`,
      fill: series.fill ? (i === 0 ? "origin" : "-1") : false,
    }));
  }

  options() {
    const form = show[this.spec.unit];
    return {
      animation: false, responsive: true, maintainAspectRatio: false, parsing: false, normalized: true,
      interaction: { mode: "index", intersect: false },
      scales: {
        x: { type: "linear", min: -kSpans[0], max: 0,
          ticks: { stepSize: 15, maxRotation: 0, callback: (value) => value === 0 ? "now"
            : value % 60 === 0 ? `\u2212${-value / 60} min` : `\u2212${-value} s` } },
        y: { min: 0, max: 1, stacked: this.spec.stacked === true,
          afterFit: (scale) => { scale.width = 72; },  // the plots stand in line, whatever their numbers
          ticks: { count: 5, callback: (value) => form(value) } },
      },
      plugins: {
        legend: { display: false },
        tooltip: { callbacks: {
          title: (items) => items.length === 0 ? "" : `${Math.round(-items[0].parsed.x)} s ago`,
          label: (item) => ` ${item.dataset.label}: ${form(item.parsed.y)}` } },
      },
    };
  }

  // Takes the colours of the style, which are other ones in the dark.
  dress() {
    this.spec.series.forEach((series, i) => {
      const own = colour(series.colour), dataset = this.chart.data.datasets[i];
      dataset.borderColor = own;
      dataset.backgroundColor = series.fill ? own + "b3" : own;
      this.keys[i].style[series.dashed ? "borderTopColor" : "backgroundColor"] = own;
    });
    for (const scale of Object.values(this.chart.options.scales)) {
      scale.ticks.color = colour("quiet");
      scale.grid = { color: colour("grid"), tickLength: 4 };
      scale.border = { color: colour("line") };
    }
    this.chart.options.font = { size: 12 };
    this.chart.update("none");
  }

  show(history) {
    const latest = history.at(-1), age = latest.time - history[0].time;
    const span = kSpans.find((seconds) => age <= seconds) ?? kLongest;
    this.chart.options.scales.x.min = -span;
    this.chart.options.scales.x.ticks.stepSize = span === 60 ? 15 : span === 120 ? 30 : 60;
    this.spec.series.forEach((series, i) => {
      this.chart.data.datasets[i].data = history.map((sample) => ({ x: sample.time - latest.time, y: sample.values[this.spec.id][i] }));
    });
    this.fit(history);
    this.chart.update("none");
    this.speak(this.spec.series.map((series, i) => this.known(history, i, series)));
  }

  // The newest value; of a series with gaps the newest that is known.
  known(history, i, series) {
    const values = history.map((sample) => sample.values[this.spec.id][i]);
    return series.gaps ? values.findLast((value) => value !== null) ?? null : values.at(-1);
  }

  // An axis grows at once and shrinks when less than a third of it is used.
  fit(history) {
    let most = 0;
    for (const { values } of history) {
      const row = values[this.spec.id];
      let stacked = 0;
      this.spec.series.forEach((series, i) => {
        if (series.fill) stacked += row[i] ?? 0;
        most = Math.max(most, stacked, row[i] ?? 0);
      });
    }
    const wanted = round_up(most, this.spec.unit);
    if (wanted > this.top || most < this.top / 3) this.top = wanted;
    this.chart.options.scales.y.max = this.top;
    if (most > 0) this.section.hidden = false;
  }

  speak(values) {
    const form = show[this.spec.unit], named = { sum: 0 };
    this.spec.series.forEach((series, i) => {
      named[series.name] = values[i];
      if (series.fill) named.sum += values[i] ?? 0;
      set_text(this.figures[i], values[i] === null ? "\u2013" : form(values[i]));
    });
    const known = this.spec.series.some((series, i) => values[i] !== null);
    set_text(this.summary, known ? this.spec.say(named) : "Not known yet.");
  }

  // The arrow keys walk along the plot; what stands there is shown as under a pointer.
  walk(event) {
    const last = this.chart.data.datasets[0].data.length - 1;
    const step = { ArrowLeft: -1, ArrowRight: 1, Home: -last, End: last }[event.key];
    if (step === undefined || last < 0) return;
    event.preventDefault();
    this.point(Math.min(last, Math.max(0, (this.place ?? last) + step)));
  }
  point(place) {
    this.place = place < 0 ? undefined : place;
    const active = place < 0 ? [] : this.chart.data.datasets.map((_, datasetIndex) => ({ datasetIndex, index: place }));
    this.chart.setActiveElements(active);
    this.chart.tooltip.setActiveElements(active, { x: 0, y: 0 });
    this.chart.update("none");
  }
}
