// The page: what all its parts share, its curves, times and rewards, and the start.
const STEP = "step", LEVEL = "health/level", BARS = 80, PAGE = 40, MARKED = 20, POLL_MILLISECONDS = 3000;
const WIDE = 220, LEFT = 46, RIGHT = 18, TOP = 8, FOOT = 22;
let data = JSON.parse(byId("data").textContent), shown = PAGE;

function byId(id) { return document.getElementById(id); }
function within(id, selector) { return document.querySelector(`#${id} ${selector}`); }

function make(name, attributes = {}, ...children) {
  const [space, tag] = name.includes(":") ? ["http://www.w3.org/2000/svg", name.split(":")[1]] : ["http://www.w3.org/1999/xhtml", name];
  const node = document.createElementNS(space, tag);
  for (const [key, value] of Object.entries(attributes)) if (value !== undefined) node.setAttribute(key, value);
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

function words(value) {
  if (value === null || value === undefined) return "none";
  if (typeof value !== "number") return String(value);
  const size = Math.abs(value);
  if (size >= 10000) return new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 4 }).format(value);
  return size && size < 0.001 ? value.toExponential(1) : String(+value.toPrecision(4));
}

function ticks(low, high) {
  const power = 10 ** Math.floor(Math.log10((high - low) / 3));
  const step = [5, 2, 1].map((n) => n * power).find((n) => (high - low) / n >= 3 * (1 - 1e-9));
  const first = Math.floor(low / step + 1e-9), last = Math.ceil(high / step - 1e-9);
  return Array.from({ length: last - first + 1 }, (_, n) => (first + n) * step);
}

function span(values) {
  let low = Infinity, high = -Infinity;
  for (const value of values) { low = Math.min(low, value); high = Math.max(high, value); }
  if (low < high) return [low, high];
  const margin = Math.abs(low) / 10 || 1;
  return [low - margin, high + margin];
}

// A frame: where values are drawn, with its axes.
function frame(width, xs, ys, unit = "") {
  const rows = ticks(...span(ys)), [left, right] = span(xs), low = rows[0], high = rows[rows.length - 1];
  const bottom = WIDE - FOOT;
  const x = (value) => LEFT + ((value - left) / (right - left)) * (width - LEFT - RIGHT);
  const y = (value) => bottom - ((value - low) / (high - low)) * (bottom - TOP);
  const svg = make("svg:svg", { viewBox: `0 0 ${width} ${WIDE}`, height: WIDE, role: "img" });
  for (const row of rows) svg.append(
    make("svg:path", { d: `M${LEFT} ${y(row)}H${width - RIGHT}`, class: "grid" }),
    make("svg:text", { x: LEFT - 6, y: y(row) + 4, "text-anchor": "end" }, words(+row.toPrecision(12)) + unit));
  return { svg, x, y, left, right, bottom, width, value: (place) => left + ((place - LEFT) / (width - LEFT - RIGHT)) * (right - left) };
}

function along(plot, unit, scale = 1) {
  for (const mark of ticks(plot.left / scale, plot.right / scale)) {
    const x = plot.x(mark * scale);
    if (x < LEFT - 1 || x > plot.width - RIGHT + 1) continue;
    plot.svg.append(make("svg:text", { x, y: plot.bottom + 16, "text-anchor": "middle" }, words(+mark.toPrecision(12)) + unit));
  }
}

function figure(title, detail, picture) {
  const readout = make("output", { hidden: "" }), caption = make("figcaption", {}, make("b", {}, title), make("small", {}, detail));
  const box = make("figure", { "aria-label": title }, caption, readout);
  box.addEventListener("pointerleave", () => { readout.hidden = true; });
  const tell = (...lines) => { readout.hidden = false; readout.replaceChildren(...lines.map((line) => make("div", {}, line))); };
  return { put: (container) => { container.append(box); box.append(picture(Math.max(caption.clientWidth, 200), tell)); } };
}

function colour(number) { return data.colours[number % data.colours.length]; }
function dashes(number) { return ["none", "6 3", "2 3"][Math.floor(number / data.colours.length) % 3]; }

function points(run, key, count) {
  const xs = run.series[byId("align").value] || [], ys = run.series[key] || [], kept = [], recent = [];
  const most = Math.round((count * ys.filter((y) => y !== null).length) / ys.length);  // fewer of what is not measured in every step
  ys.forEach((y, place) => {
    if (y === null || xs[place] === null) return;
    recent.push(y);
    if (recent.length > Math.max(most, 1)) recent.shift();
    kept.push({ x: xs[place], y: recent.reduce((sum, one) => sum + one, 0) / recent.length, raw: y, place });
  });
  return kept;
}

function nearest(list, x) {
  let low = 0, high = list.length - 1;
  while (high - low > 1) { const middle = (low + high) >> 1; if (list[middle].x < x) low = middle; else high = middle; }
  return Math.abs(list[low].x - x) <= Math.abs(list[high].x - x) ? list[low] : list[high];
}

function verdict(run, place) {
  const level = (run.series[LEVEL] || [])[place] || 0;
  const rules = Object.keys(run.series).filter((key) => key.startsWith("health/") && key !== LEVEL && run.series[key][place]);
  return level ? ` ${data.levels[level]}: ${rules.map((key) => key.slice(7)).join(", ") || "no rule named"}` : "";
}

function axis(value) {
  const by = byId("align").value;
  if (by === "axis/seconds") return value > 7200 ? [" h", 3600] : value > 120 ? [" min", 60] : [" s", 1];
  return ["", 1];
}

function chart(key, title) {
  const count = +byId("smooth").value;
  const lines = data.runs.map((run, number) => ({ run, number, list: points(run, key, count) })).filter((line) => line.list.length);
  if (!lines.length) return null;
  return figure(title, key, (width, tell) => {
    const all = lines.flatMap((line) => line.list);
    const ends = lines.flatMap(({ run }) => { const xs = run.series[byId("align").value]; return [xs[0], xs[xs.length - 1]]; });
    const plot = frame(width, ends, all.flatMap((one) => [one.y, one.raw]));
    const [unit, scale] = axis(plot.right);
    along(plot, unit, scale);
    if (count > 1) for (const { number, list } of lines) plot.svg.append(line(plot, list, (one) => one.raw, { class: "line faint", ...stroke(number) }));
    for (const { number, list } of lines) plot.svg.append(...curve(plot, number, list));
    for (const { run, list } of lines) plot.svg.append(...marks(plot, run, list));
    const hair = plot.svg.appendChild(make("svg:path", { class: "hair" }));
    plot.svg.addEventListener("pointerleave", () => hair.setAttribute("d", ""));
    plot.svg.addEventListener("pointermove", (event) => {
      const x = plot.value(event.clientX - plot.svg.getBoundingClientRect().left);
      const found = lines.map((line) => ({ ...line, at: nearest(line.list, x) }));
      hair.setAttribute("d", `M${plot.x(found[0].at.x)} ${TOP}V${plot.bottom}`);
      const place = `${byId("align").value === STEP ? "step " : ""}${words(+(found[0].at.x / scale).toPrecision(4))}${unit || (byId("align").value === STEP ? "" : " tokens")}`;
      tell(place, ...found.map(({ run, number, at }) => tinted(number, `${words(at.y)}  ${run.name}${verdict(run, at.place)}`)));
    });
    return plot.svg;
  });
}

function tinted(number, text) { const node = make("span", {}, text); node.style.color = colour(number); return node; }

function stroke(number) { return { stroke: colour(number), "stroke-dasharray": dashes(number) }; }

function line(plot, list, value, attributes) {
  const d = list.map((one, n) => `${n ? "L" : "M"}${plot.x(one.x).toFixed(1)} ${plot.y(value(one)).toFixed(1)}`).join("");
  return make("svg:path", { d, ...attributes });
}

// A line, with dots where points are few.
function curve(plot, number, list) {
  const dots = list.length > MARKED ? [] : list.map((one) => make("svg:circle", { cx: plot.x(one.x), cy: plot.y(one.y), r: 3, fill: colour(number) }));
  return [line(plot, list, (one) => one.y, { class: "line", ...stroke(number) }), ...dots];
}

// Stretches of steps that are to be watched, or bad.
function marks(plot, run, list) {
  const level = (one) => (run.series[LEVEL] || [])[one.place] || 0, made = [];
  for (let start = 0, end; start < list.length; start = end) {
    for (end = start + 1; end < list.length && level(list[end]) === level(list[start]);) end += 1;
    const bad = level(list[start]), x = plot.x(list[start].x), y = plot.y(list[start].y);
    if (bad) made.push(line(plot, list.slice(start, end), (one) => one.y, { class: `stretch level${bad}` }),
      make("svg:path", { d: bad > 1 ? `M${x - 6} ${y}l6 -6l6 6l-6 6z` : `M${x - 6} ${y + 4}h12l-6 -10z`, class: `mark level${bad}` }));
  }
  return made;
}

// Seconds of each phase, in at most BARS bars; what no phase accounts for is `other`.
function bars(run) {
  const phases = phaseNames(), steps = run.series[STEP] || [], whole = run.series["time/step"] || [], size = Math.ceil(steps.length / BARS);
  const found = [];
  for (let start = 0; start < steps.length; start += size) {
    const places = steps.slice(start, start + size).map((_, n) => start + n).filter((place) => whole[place] !== null && whole[place] !== undefined);
    if (!places.length) continue;
    const mean = (list) => places.reduce((sum, place) => sum + ((list || [])[place] || 0), 0) / places.length;
    const parts = phases.slice(0, -1).map((name) => mean(run.series[`time/${name}`]));
    found.push({ from: steps[places[0]], to: steps[places[places.length - 1]], parts: [...parts, Math.max(0, mean(whole) - parts.reduce((sum, one) => sum + one, 0))] });
  }
  return found;
}

function phaseNames() {
  const names = new Set(data.runs.flatMap((run) => Object.keys(run.series)).filter((key) => key.startsWith("time/") && key !== "time/step").map((key) => key.slice(5)));
  return [...names, "other"];
}

function tone(phase, phases) { return phase === phases.length - 1 ? "rest" : `phase${phase % 7}`; }

function stacked(run, highest) {
  const list = bars(run), phases = phaseNames();
  return figure(run.name, run.series[STEP].length > BARS ? `means of ${Math.ceil(run.series[STEP].length / BARS)} steps` : "each step", (width, tell) => {
    const plot = frame(width, [0, Math.max(list.length, 1)], [0, highest || 1]);
    list.forEach((bar, place) => {
      let height = 0;
      const box = make("svg:g", {});
      bar.parts.forEach((seconds, phase) => {
        const y = plot.y(height + seconds), x = plot.x(place);
        box.append(make("svg:rect", { x, y, width: Math.max(plot.x(place + 1) - x - 1, 0.5), height: Math.max(plot.y(height) - y, 0), class: tone(phase, phases) }));
        height += seconds;
      });
      const said = bar.parts.map((seconds, phase) => (seconds > 0.0005 ? `${words(+seconds.toPrecision(3))} s  ${phases[phase]}` : "")).filter(Boolean);
      box.addEventListener("pointerenter", () => tell(`step ${bar.from === bar.to ? bar.from : `${bar.from} to ${bar.to}`}`, ...said));
      plot.svg.append(box);
    });
    for (const place of new Set([0, list.length >> 1, list.length - 1])) if (list[place]) plot.svg.append(
      make("svg:text", { x: (plot.x(place) + plot.x(place + 1)) / 2, y: plot.bottom + 16, "text-anchor": "middle" }, String(list[place].from)));
    return plot.svg;
  });
}

// Shares of the transcripts by reward, the runs side by side.
function histogram(name) {
  const [low, high] = data.bins, found = data.runs.map((run, number) => ({ run, number, counts: run.histograms[name] })).filter((one) => one.counts);
  for (const one of found) one.total = one.counts.reduce((sum, count) => sum + count, 0);
  return figure(name, `${found.map((one) => one.total).join(" / ")} transcripts`, (width, tell) => {
    const plot = frame(width, [low, high], [0, ...found.flatMap((one) => one.counts.map((count) => (100 * count) / one.total))], "%");
    const bins = found[0].counts.length, wide = (plot.x(high) - plot.x(low)) / bins;
    for (let bin = 0; bin < bins; bin += 1) {
      const box = plot.svg.appendChild(make("svg:g", {})), from = low + (bin * (high - low)) / bins;
      box.append(make("svg:rect", { x: plot.x(from), y: TOP, width: wide, height: plot.bottom - TOP, fill: "transparent" }));
      found.forEach(({ number, counts, total }, place) => {
        const y = plot.y((100 * counts[bin]) / total), share = (wide - 2) / found.length;
        box.append(make("svg:rect", { x: plot.x(from) + 1 + place * share, y, width: share, height: plot.bottom - y, fill: colour(number) }));
      });
      box.addEventListener("pointerenter", () => tell(`${words(from)} to ${words(from + (high - low) / bins)}`, ...found.map(({ run, number, counts }) => tinted(number, `${counts[bin]}  ${run.name}`))));
    }
    along(plot, "");
    return plot.svg;
  });
}

function card(run, number) {
  const name = make("h2", {}, swatch(number), run.name), facts = make("dl", {});
  for (const [key, value] of Object.entries(run.facts)) facts.append(make("div", {}, make("dt", {}, key), make("dd", {}, value)));
  const { health } = run;
  const times = health && health.counts.map((count, level) => (level && count ? `${count} x ${data.levels[level]}` : "")).filter(Boolean).join(", ");
  const said = health && make("p", { class: `health badge${health.level}` }, make("b", {}, data.levels[health.level]),
    ` ${health.rules.join(", ")}${times ? ` (${times} over all steps)` : ""}`);
  return make("article", {}, name, make("p", { class: "verb" }, run.verb || "no config.yaml"), facts, said,
    run.plan ? make("details", { class: "plan" }, make("summary", {}, "plan and recipe"), make("pre", {}, run.plan)) : null,
    run.findings.length ? make("details", { class: "findings" }, make("summary", {}, `${run.findings.length} findings`),
      make("ul", {}, ...run.findings.map(({ step, level, code, what, why, key }) => make("li", {},
        `step ${step}, ${level} (${code}): ${[what, why, key].filter(Boolean).join("; ")}`)))) : null);
}

function swatch(number) {
  return make("svg:svg", { class: "swatch", width: 18, height: 10 }, make("svg:path", { d: "M0 5h18", stroke: colour(number), "stroke-width": 4, "stroke-dasharray": dashes(number) }));
}

function choices(id, values) {
  const box = byId(id), known = new Set([...box.options].map((one) => one.value));
  for (const value of [...new Set(values)].sort()) if (!known.has(value)) box.append(make("option", { value }, value));
}

function showConfiguration() {
  const keys = [...new Set(data.runs.flatMap((run) => Object.keys(run.config)))], text = byId("path").value.toLowerCase();
  const several = data.runs.length > 1, only = several && byId("differing").checked;
  const rows = keys.map((key) => [key, data.runs.map((run) => run.config[key])]).map(([key, values]) => [key, values, new Set(values).size > 1]);
  const kept = rows.filter(([key, values, differs]) => (differs || !only) && (!text || `${key} ${values.join(" ")}`.toLowerCase().includes(text)));
  const head = make("tr", {}, make("th", {}, "key"), ...data.runs.map((run, number) => make("th", {}, swatch(number), run.name)));
  const body = kept.map(([key, values, differs]) => make("tr", differs ? { class: "differs" } : {}, make("th", {}, key), ...values.map((value) => make("td", {}, value === undefined ? "" : value))));
  within("configuration", ".list").replaceChildren(kept.length ? make("table", {}, head, ...body) : make("p", { class: "none" }, only ? "The runs do not differ." : "No key fits."));
  byId("differing").parentElement.hidden = !several;
}

function showRest() {
  const failures = data.runs.flatMap((run, number) => run.failures.map((one) => make("details", {},
    make("summary", {}, swatch(number), make("span", {}, one.function), make("span", { class: "start" }, one.error.split("\n").filter(Boolean).pop() || "")), make("pre", {}, one.error), make("pre", { class: "command" }, one.command))));
  within("failures", ".list").replaceChildren(...failures);
  byId("failures").hidden = !failures.length;
  const ledgers = data.runs.map((run, number) => [run, number]).filter(([run]) => run.ledger);
  within("ledger", ".list").replaceChildren(...ledgers.map(([run, number]) => make("table", {},
    make("tr", {}, make("th", {}, swatch(number), run.name), make("th", {}, "so far"), make("th", {}, `numbers in the last row, of step ${run.ledger.step}`)),
    ...Object.entries(run.ledger.fates).map(([fate, [sum, last]]) => make("tr", {}, make("th", {}, fate), make("td", {}, String(sum)), make("td", {}, last || "none"))))));
  byId("ledger").hidden = !ledgers.length;
}

function fill(id, figures) {
  const box = within(id, ".charts"), kept = figures.filter(Boolean);
  box.replaceChildren();
  for (const one of kept) one.put(box);
  return kept.length;
}

function showCharts() {
  const other = byId("other").value;
  if (!fill("curves", [...Object.entries(data.charts), ...(other ? [[other, other]] : [])].map(([key, title]) => chart(key, title))))
    within("curves", ".charts").append(make("p", { class: "none" }, "No step has been logged yet."));
  const signs = data.runs.some((run) => (run.series[LEVEL] || []).some((level) => level)) ? [make("span", { class: "text1" }, "\u25b2 watch"), make("span", { class: "text2" }, "\u25c6 bad")] : [];
  byId("key").replaceChildren(...data.runs.map((run, number) => make("span", {}, swatch(number), run.name)), ...signs);
  const sums = data.runs.map((run) => bars(run).map((bar) => bar.parts.reduce((sum, one) => sum + one, 0)));
  byId("times").hidden = !sums.flat().length;
  fill("times", data.runs.filter((_, number) => sums[number].length).map((run) => stacked(run, Math.max(0, ...sums.flat()))));
  within("times", ".legend").replaceChildren(...phaseNames().map((name, phase) => make("span", {}, make("i", { class: tone(phase, phaseNames()) }), name)));
  byId("rewards").hidden = !fill("rewards", [...new Set(data.runs.flatMap((run) => Object.keys(run.histograms)))].sort().map(histogram));
}

function show() {
  byId("runs").replaceChildren(...data.runs.map(card));
  choices("other", data.runs.flatMap((run) => Object.keys(run.series)).filter((key) => !(key in data.charts) && key !== STEP && !key.startsWith("axis/")));
  choices("run", data.runs.map((run) => run.name));
  for (const key of ["purpose", "outcome"]) choices(key, data.runs.flatMap((run) => run.transcripts.map((one) => String(one[key]))));
  byId("transcripts").hidden = !data.runs.some((run) => run.transcripts.length);
  showCharts();
  showTimeline();
  showTranscripts();
  showRest();
  showConfiguration();
  for (const link of document.querySelectorAll("nav a")) link.hidden = byId(link.hash.slice(1)).hidden;
}

async function poll() {
  try {
    const answer = await fetch(`data?known=${data.stamp}`);
    if (answer.status === 200) { data = await answer.json(); show(); }
    byId("live").textContent = answer.ok ? "live" : "no longer served";
  } catch { byId("live").textContent = "no longer served"; }
}

let width = innerWidth;
addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; showCharts(); showTimeline(); } });
for (const form of document.forms) form.addEventListener("submit", (event) => event.preventDefault());
within("curves", "form").addEventListener("change", showCharts);
within("timeline", "form").addEventListener("change", showTimeline);
within("transcripts", "form").addEventListener("input", () => { shown = PAGE; showTranscripts(); });
within("configuration", "form").addEventListener("input", showConfiguration);
byId("more").addEventListener("click", () => { shown += PAGE; showTranscripts(); });
byId("smooth").value = String(data.mean);
show();
if (data.stamp) { byId("live").textContent = "live"; setInterval(poll, POLL_MILLISECONDS); }
document.documentElement.dataset.drawn = Math.round(performance.now());  // milliseconds
