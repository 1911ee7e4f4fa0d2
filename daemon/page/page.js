// Asks the daemon once a second, keeps five minutes of answers, and shows those of the scope that was chosen.

const kPeriod = 1000;  // milliseconds
const kPatience = 5000;

const page = {
  answers: [],  // whole ones, the oldest first
  scope: "node",
  paused: false,
  plots: [],
};

// Bytes a second, both ways.
function traffic({ before, now, seconds }) {
  return rate(before, now, seconds, (counted) =>
    at(counted, "transfer_bytes_total", "d2h") + at(counted, "transfer_bytes_total", "h2d"));
}

const tiles = [
  ["HBM live", (pair) => show.bytes(at(held(pair.now), "hbm")),
    (pair) => `of ${show.bytes(at(pair.now, "lease_bytes", "hbm"))} leased`],
  ["DDR live", (pair) => show.bytes(at(held(pair.now), "ddr")),
    (pair) => `of ${show.bytes(at(pair.now, "tier_mapped_bytes", "ddr"))} pinned`],
  ["Found in cache", (pair) => {
    const found = (name) => of_outcome(pair.now.cache_fetches_total, name);
    const share = ratio(found("hit") + found("late"), found("hit") + found("late") + found("miss"));
    return share === null ? "\u2013" : show.percent(share);
  }, (pair) => `of ${show.count(total(pair.now.cache_fetches_total))} fetches`],
  ["Stalled", (pair) => {
    const shares = kStallReasons.map((reason) => stall(reason)(pair));
    return shares.includes(null) ? "\u2013" : show.percent(shares.reduce((sum, share) => sum + share, 0));
  }, () => "of a process's time"],
  ["Link", (pair) => show.rate(traffic(pair) ?? 0), (pair) => {
    const share = ratio(traffic(pair), total(pair.now.link_peak_bytes_per_second));
    return share === null ? "both ways" : `${show.percent(share)} of its peak`;
  }],
  ["Steps", (pair) => show.count(at(pair.now, "steps_total")),
    (pair) => `${pair.now.processes} ${pair.now.processes === 1 ? "process" : "processes"} now`],
];

const columns = [
  ["processes", (counted) => show.count(counted.processes)],
  ["HBM live", (counted) => show.bytes(at(held(counted), "hbm"))],
  ["HBM leased", (counted) => show.bytes(at(counted, "lease_bytes", "hbm"))],
  ["DDR live", (counted) => show.bytes(at(held(counted), "ddr"))],
  ["DDR leased", (counted) => show.bytes(at(counted, "lease_bytes", "ddr"))],
  ["to DDR", (counted) => show.bytes(at(counted, "transfer_bytes_total", "d2h"))],
  ["to HBM", (counted) => show.bytes(at(counted, "transfer_bytes_total", "h2d"))],
  ["hits", (counted) => show.count(of_outcome(counted.cache_fetches_total, "hit"))],
  ["late", (counted) => show.count(of_outcome(counted.cache_fetches_total, "late"))],
  ["misses", (counted) => show.count(of_outcome(counted.cache_fetches_total, "miss"))],
  ["stalled", (counted) => show.seconds(at(counted, "stall_seconds_total"))],
  ["steps", (counted) => show.count(at(counted, "steps_total"))],
];

const by_id = (id) => document.getElementById(id);

// Two answers in a row, of the scope that is shown.
function pair_at(i) {
  const now = of_scope(page.answers[i], page.scope);
  if (i === 0) return { before: undefined, now, seconds: 0 };
  return { before: of_scope(page.answers[i - 1], page.scope), now, seconds: page.answers[i].time - page.answers[i - 1].time };
}
function sample_at(i) {
  const pair = pair_at(i), values = {};
  for (const plot of kPlots)
    values[plot.id] = plot.series.map((series) => pair.now === undefined ? null : series.value(pair) ?? null);
  return { time: page.answers[i].time, values };
}

function show_tiles() {
  const pair = pair_at(page.answers.length - 1);
  const list = by_id("tiles");
  if (list.children.length === 0) {
    for (const [name] of tiles)
      list.append(element("div", {}, element("dt", {}, name), element("dd", { class: "figure" }), element("dd", { class: "beside" })));
  }
  tiles.forEach(([, figure, beside], i) => {
    const [, first, second] = list.children[i].children;
    set_text(first, pair.now === undefined ? "\u2013" : figure(pair));
    set_text(second, pair.now === undefined ? "not on this node now" : beside(pair));
  });
}

// Cells are kept and written over: who has the focus keeps it.
function show_table(id, kind, counted) {
  const table = by_id(id), body = table.tBodies[0];
  if (table.tHead.rows.length === 0) {
    const names = [kind === "job" ? "job" : "GPU", ...columns.map(([name]) => name)];
    table.tHead.append(element("tr", {}, ...names.map((name) => element("th", { scope: "col" }, name))));
  }
  const names = Object.keys(counted).sort();
  names.forEach((name, i) => {
    if (body.rows[i] === undefined) {
      const button = element("button", { type: "button" });
      button.addEventListener("click", () => choose(button.dataset.scope));
      body.append(element("tr", {}, element("th", { scope: "row" }, button), ...columns.map(() => element("td"))));
    }
    const cells = body.rows[i].cells, button = cells[0].firstChild;
    button.dataset.scope = `${kind}:${name}`;
    set_text(button, name);
    columns.forEach(([, value], column) => set_text(cells[column + 1], value(counted[name])));
  });
  while (body.rows.length > names.length) body.rows[body.rows.length - 1].remove();
}

function offer_scopes(now) {
  const wanted = [["node", "whole node"], ...Object.keys(now.jobs).sort().map((job) => [`job:${job}`, `job ${job}`]),
    ...Object.keys(now.devices).sort().map((device) => [`gpu:${device}`, `GPU ${device}`])];
  if (!wanted.some(([scope]) => scope === page.scope)) wanted.push([page.scope, page.scope.replace(":", " ") + " (gone)"]);
  const select = by_id("scope");
  const same = select.options.length === wanted.length && wanted.every(([scope, name], i) =>
    select.options[i].value === scope && select.options[i].text === name);
  if (same) return;
  select.replaceChildren(...wanted.map(([value, name]) => element("option", { value }, name)));
  select.value = page.scope;
}

function render() {
  const history = page.answers.map((_, i) => page.samples[i] ?? (page.samples[i] = sample_at(i)));
  for (const plot of page.plots) plot.show(history);
  show_tiles();
  const now = page.answers.at(-1);
  show_table("jobs", "job", now.jobs);
  show_table("devices", "gpu", now.devices);
  offer_scopes(now);
}

function choose(scope) {
  page.scope = scope;
  by_id("scope").value = scope;
  page.samples = [];
  for (const plot of page.plots) plot.top = 0;
  if (page.answers.length > 0) render();
}

function take(answer) {
  if (page.answers.length > 0 && answer.time <= page.answers.at(-1).time) {
    page.answers = [];  // the machine's clock was set back
    page.samples = [];
  }
  page.answers.push(answer);
  while (page.answers[0].time < answer.time - kLongest) {
    page.answers.shift();
    page.samples.shift();
  }
  render();
}

function state(text, lost) {
  set_text(by_id("state"), text);
  by_id("state").classList.toggle("lost", lost);
}

async function ask() {
  if (!page.paused && !document.hidden) {
    try {
      const reply = await fetch("api/v1/now", { signal: AbortSignal.timeout(kPatience), cache: "no-store" });
      if (!reply.ok) throw new Error(`HTTP ${reply.status}`);
      const answer = await reply.json();
      state(`terraced ${answer.version} \u00b7 ${answer.clients} ${answer.clients === 1 ? "process" : "processes"}`, false);
      take(answer);
    } catch (error) {
      state(`No answer from terraced (${error.message}); asking again`, true);
    }
  }
  setTimeout(ask, kPeriod);
}

page.samples = [];
Chart.defaults.font.family = getComputedStyle(document.body).fontFamily;
page.plots = kPlots.map((spec) => new Plot(spec, by_id("plots")));
by_id("scope").addEventListener("change", (event) => choose(event.target.value));
by_id("pause").addEventListener("click", (event) => {
  page.paused = !page.paused;
  event.target.setAttribute("aria-pressed", String(page.paused));
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => page.plots.forEach((plot) => plot.dress()));
ask();
