
// Charts: curves and bars that uPlot draws, which runs are shown, and a table of their numbers.
const BARS = 80, MARKED = 20, CHARTS = 24, HIGH = 220, drawings = new Map();  // charts by the box that holds them

function colour(number) { return data.colours[number % data.colours.length]; }
function dashes(number) { return [[], [6, 3], [2, 3]][Math.floor(number / data.colours.length) % 3]; }
function tinted(number, text) { const node = make("span", {}, text); node.style.color = colour(number); return node; }

// A colour of the style sheet, as it is now.
function paint(name) {
  byId("probe").style.color = `var(--${name})`;
  return getComputedStyle(byId("probe")).color;
}

function figure(title, detail, picture, ...tools) {
  const readout = make("output", { hidden: "" }), caption = make("figcaption", {}, make("span", { class: "tools" }, ...tools), make("b", {}, title), make("small", {}, detail));
  const box = make("figure", { "aria-label": title }, caption, readout);
  box.addEventListener("pointerleave", () => { readout.hidden = true; });
  const tell = (...lines) => { readout.hidden = false; readout.replaceChildren(...lines.map((line) => make("div", {}, line))); };
  return { put: (container) => { container.append(box); return picture(box, Math.max(caption.clientWidth, 200), tell); } };
}

function fill(id, figures) {
  const box = within(id, ".charts"), kept = figures.filter(Boolean);
  box.style.minHeight = `${box.offsetHeight}px`;  // so that the page does not scroll; heights come in a microtask
  queueMicrotask(() => { box.style.minHeight = ""; });
  for (const one of drawings.get(id) || []) one.destroy();
  box.replaceChildren();
  drawings.set(id, kept.map((one) => one.put(box)).filter(Boolean));
  return kept.length;
}

// A chart of columns of numbers, the first of which are places on the x axis. `at` is told what is under the pointer.
function plot(box, width, { columns, series, at, says, x = {}, y = {}, unit = "", zoom = false, draw = () => {} }) {
  const axis = { stroke: () => paint("dim"), font: "11px system-ui, sans-serif", ticks: { show: false }, grid: { stroke: () => paint("line"), width: 1 } };
  const said = (end) => (chart, marks) => marks.map((mark) => (mark === null ? "" : words(+mark.toPrecision(12)) + end));
  const chart = new uPlot({
    width, height: HIGH, legend: { show: false }, padding: [10, 14, 0, 0], series: [{}, ...series],
    scales: { x: { time: false, ...x.scale }, y },
    axes: [{ ...axis, size: 26, gap: 4, values: said(unit), ...x.axis }, { ...axis, size: 54, gap: 4, values: said(y.unit || "") }],
    cursor: { y: false, drag: { x: zoom, y: false, setScale: false }, points: { show: false }, sync: zoom ? { key: "curves" } : undefined, bind: { dblclick: () => zoomTo } },
    hooks: {
      setCursor: [({ cursor }) => { if (cursor.event && cursor.idx !== null && cursor.left >= 0) at(cursor.idx); }], draw: [draw],
      setSelect: [(one) => { if (one.cursor.event && one.select.width > 3) zoomTo([one.posToVal(one.select.left, "x"), one.posToVal(one.select.left + one.select.width, "x")]); }],
    },
  }, columns, box);
  chart.root.setAttribute("role", "img");
  chart.root.setAttribute("aria-label", says);
  return chart;
}

function zoomTo(range) {
  const axis = byId("align").value, [, scale] = unitOf(axis, mostOf(axis));
  view.zoom = Array.isArray(range) ? range.map((place) => String(+(place * scale).toPrecision(5))) : [];
  showCharts();
}

function shownRuns() { return data.runs.map((run, number) => ({ run, number })).filter(({ run }) => !view.hide.includes(run.name)); }
function mostOf(axis) { return shownRuns().reduce((most, { run }) => Math.max(most, (run.series[axis] || []).at(-1) || 0), 0); }

function verdict(run, place) {
  const level = (run.series[LEVEL] || [])[place] || 0;
  const rules = Object.keys(run.series).filter((key) => key.startsWith("health/") && key !== LEVEL && run.series[key][place]);
  return level ? ` ${data.levels[level]}: ${rules.map((key) => key.slice(7)).join(", ") || "no rule named"}` : "";
}

function line(number, list, more = {}) {
  return { stroke: colour(number), width: 1.6, dash: dashes(number), spanGaps: true, points: { show: list.length <= MARKED, size: 6, fill: colour(number) }, ...more };
}

// A button that adds a word to a list of the view, or takes it away.
function switching(list, word, text, hint) {
  const on = view[list].includes(word), button = make("button", { type: "button", class: "small", "aria-pressed": String(on), title: hint, "data-name": `${list} ${word}` }, text);
  button.addEventListener("click", () => { view[list] = on ? view[list].filter((one) => one !== word) : [...view[list], word]; showCharts(); });
  return button;
}

function chart(key) {
  const axis = byId("align").value, count = WINDOWS[byId("smooth").value], log = view.log.includes(key), [unit, scale] = unitOf(axis, mostOf(axis));
  const lines = shownRuns().map(({ run, number }) => ({ run, number, list: points((run.series[axis] || []).map((x) => x / scale), run.series[key] || [], count, log) })).filter((one) => one.list.length);
  const tools = [switching("pin", key, "pin", "Keep this chart first, whatever the filter is"), switching("log", key, "log", "Logarithmic axis")];
  const notes = [count > 1 ? `smoothed by ${count}` : "", key, log ? "log axis without values up to 0" : ""].filter(Boolean).join("; ");
  if (!lines.length) return log ? figure(data.charts[key] || key, `${key}; no value is above 0`, () => null, ...tools) : null;
  return figure(data.charts[key] || key, notes, (box, width, tell) => {
    const behind = count > 1 ? lines : [], values = (list, name) => list.map((one) => (log && one[name] <= 0 ? null : one[name]));
    const tables = [...behind.map(({ list }) => [list.map((one) => one.x), values(list, "raw")]), ...lines.map(({ list }) => [list.map((one) => one.x), values(list, "y")])];
    const columns = uPlot.join(tables), zoomed = view.zoom.length === 2 ? view.zoom.map((end) => end / scale) : null;
    const at = (place) => {
      const ended = ({ list }) => (list.at(-1).x < columns[0][place] ? " at its end" : "");
      const found = lines.map((one) => ({ ...one, at: nearest(one.list, columns[0][place]), end: ended(one) })), where = words(+columns[0][place].toPrecision(4));
      tell(`${axis === STEP ? "step " : ""}${where}${axis === "axis/tokens" ? " tokens" : unit}${count > 1 ? ", smoothed (as logged)" : ""}`,
        ...found.map(({ run, number, at, end }) => tinted(number, `${words(at.y)}${count > 1 ? ` (${words(at.raw)})` : ""}  ${run.name}${end}${verdict(run, at.place)}`)));
    };
    return plot(box, width, {
      columns, at, unit, zoom: true, y: { distr: log ? 3 : 1 }, x: zoomed ? { scale: { range: zoomed } } : {}, draw: (one) => lines.forEach((each) => mark(one, each)),
      series: [...behind.map(({ number, list }) => line(number, list, { alpha: 0.25, points: { show: false } })), ...lines.map(({ number, list }) => line(number, list))],
      says: `${key}: ${lines.map(({ run, list }) => `${run.name} ${words(list.at(-1).y)} at the end`).join(", ")}`,
    });
  }, ...tools);
}

// Over a curve: stretches of steps that are to be watched, or bad.
function mark({ ctx, bbox, valToPos }, { run, list }) {
  const found = stretches(list, run.series[LEVEL] || []), size = 6 * devicePixelRatio;
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
  ctx.clip();
  for (const { level, from, end } of found) {
    const path = list.slice(from, end).map((one) => [valToPos(one.x, "x", true), valToPos(one.y, "y", true)]), [[x, y]] = path;
    const sign = level > 1 ? [[x - size, y], [x, y - size], [x + size, y], [x, y + size]] : [[x - size, y + size / 2], [x + size, y + size / 2], [x, y - size]];
    ctx.strokeStyle = ctx.fillStyle = paint(level > 1 ? "bad" : "watch");
    ctx.lineWidth = size / 2;
    ctx.stroke(new Path2D(`M${path.join("L")}`));
    ctx.fill(new Path2D(`M${sign.join("L")}Z`));
  }
  ctx.restore();
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

function tone(phase, phases) { return phase === phases.length - 1 ? "rest" : `tone${phase % 7}`; }

function bar(fill, size, more = {}) { return { fill, width: 0, points: { show: false }, paths: uPlot.paths.bars({ size: [size, Infinity] }), ...more }; }

function stacked({ run }, highest) {
  const list = bars(run), phases = phaseNames();
  return figure(run.name, run.series[STEP].length > BARS ? `means of ${Math.ceil(run.series[STEP].length / BARS)} steps` : "each step", (box, width, tell) => {
    const heights = phases.map((_, phase) => list.map((one) => one.parts.slice(0, phase + 1).reduce((sum, part) => sum + part, 0)));
    const at = (place) => {
      const { from, to, parts } = list[place];
      tell(`step ${from === to ? from : `${from} to ${to}`}`, ...parts.map((seconds, phase) => (seconds > 0.0005 ? `${words(+seconds.toPrecision(3))} s  ${phases[phase]}` : "")).filter(Boolean));
    };
    return plot(box, width, {
      columns: [list.map((_, place) => place), ...heights.reverse()], at, says: `Seconds of a step of ${run.name}, by phase`, y: { range: [0, highest || 1] },
      x: { scale: { range: [-0.5, list.length - 0.5] }, axis: { incrs: [1, 2, 5, 10, 20, 50], values: (_, marks) => marks.map((place) => (list[place] ? String(list[place].from) : "")) } },
      series: phases.map((_, phase) => bar(paint(tone(phase, phases)), list.length > 1 ? 0.94 : 0.3)).reverse(),
    });
  });
}

// Shares of the transcripts by reward, the runs side by side.
function histogram(name) {
  const [low, high] = data.bins, found = shownRuns().map(({ run, number }) => ({ run, number, counts: run.histograms[name] })).filter((one) => one.counts);
  if (!found.length) return null;
  for (const one of found) one.total = one.counts.reduce((sum, count) => sum + count, 0);
  return figure(name, `${found.map((one) => one.total).join(" / ")} transcripts`, (box, width, tell) => {
    const bins = found[0].counts.length, wide = (high - low) / bins;
    const tables = found.map(({ counts, total }, place) => [counts.map((_, bin) => low + wide * (bin + (place + 0.5) / found.length)), counts.map((count) => (100 * count) / total)]);
    const columns = uPlot.join(tables), at = (place) => {
      const bin = Math.min(Math.floor((columns[0][place] - low) / wide), bins - 1), from = low + bin * wide;
      tell(`${words(from)} to ${words(from + wide)}`, ...found.map(({ run, number, counts }) => tinted(number, `${counts[bin]}  ${run.name}`)));
    };
    return plot(box, width, {
      columns, at, says: `Rewards of ${name}`, y: { range: (_, least, most) => [0, Math.max(most, 1) * 1.05], unit: "%" }, x: { scale: { range: [low, high] } },
      series: found.map(({ number }) => bar(colour(number), 0.9 / found.length)),
    });
  });
}

function memoryOf({ run }) {
  const { step, gib } = run.memory, names = Object.keys(gib);
  return figure(run.name, make("span", { class: "names" }, ...names.map((who, number) => make("span", {}, swatch(number), who))), (box, width, tell) => plot(box, width, {
    columns: [step, ...names.map((who) => gib[who])], says: `GiB of the processes of ${run.name}`, y: { range: (_, least, most) => [0, most * 1.05 || 1] },
    at: (place) => tell(`step ${step[place]}`, ...names.map((who, number) => tinted(number, `${words(gib[who][place])}  ${who}`))),
    series: names.map((_, number) => line(number, step)),
  }));
}

function swatch(number) {
  return make("svg:svg", { class: "swatch", width: 18, height: 10, "aria-hidden": "true" }, make("svg:path", { d: "M0 5h18", stroke: colour(number), "stroke-width": 4, "stroke-dasharray": dashes(number).join(" ") }));
}

// A button for each run: a click hides or shows it, a double click shows it alone, or all again.
function legend() {
  return data.runs.map((run, number) => {
    const button = make("button", { type: "button", class: "small run", "data-run": run.name, title: "Click: hide or show. Double click or Shift+Enter: only this one" }, swatch(number), run.name);
    const others = data.runs.map((one) => one.name).filter((name) => name !== run.name);
    const alone = () => { view.hide = others.every((name) => view.hide.includes(name)) && !view.hide.includes(run.name) ? [] : others; showRuns(); };
    const turn = () => { view.hide = view.hide.includes(run.name) ? view.hide.filter((name) => name !== run.name) : [...view.hide, run.name]; showRuns(); };
    button.addEventListener("click", (event) => (event.shiftKey ? alone() : turn()));
    button.addEventListener("dblclick", alone);
    return button;
  });
}

function showRuns() {
  showCharts();
  showTimeline();
}

// The numbers of the metrics that are shown, a row for each run; a click on a metric sorts.
function table(metrics) {
  const kind = byId("kind").value, [by, way] = view.sort, value = (run, metric) => summaryOf(run, metric, kind, data.better[metric]), number = (run, metric) => (value(run, metric) || {}).value;
  const names = metrics.filter((metric) => shownRuns().some(({ run }) => value(run, metric)));
  const head = names.map((metric) => {
    const button = make("button", { type: "button", class: "plain", title: metric, "data-name": `sort ${metric}` }, data.charts[metric] || metric, by === metric ? (way === "down" ? " \u25bc" : " \u25b2") : "");
    button.addEventListener("click", () => { view.sort = by === metric && way === "down" ? [metric, "up"] : [metric, "down"]; showCharts(); });
    return make("th", { scope: "col", "aria-sort": by === metric ? `${way === "down" ? "de" : "a"}scending` : undefined }, button);
  });
  const lines = by ? sorted(shownRuns(), ({ run }) => number(run, by), way === "down") : shownRuns();
  const top = new Map(names.map((metric) => [metric, number(sorted(lines, ({ run }) => number(run, metric), data.better[metric] === "higher")[0].run, metric)]));
  const cell = (run, metric) => {
    const found = value(run, metric), told = ["last", "lowest", "highest"].map((one) => [one, summaryOf(run, metric, one)]).map(([one, at]) => at && `${one} ${words(at.value)} at step ${at.step}`);
    const first = data.better[metric] && lines.length > 1 && top.get(metric) === number(run, metric);
    return make("td", { title: told.filter(Boolean).join("\n"), class: first ? "first" : undefined }, found ? words(found.value) : "", kind === "last" || !found ? null : make("small", {}, ` step ${found.step}`));
  };
  const rows = lines.map(({ run, number }) => make("tr", {}, make("th", { scope: "row" }, swatch(number), run.name), ...names.map((metric) => cell(run, metric))));
  return names.length ? [make("table", {}, make("thead", {}, make("tr", {}, make("th", { scope: "col" }, "run"), ...head)), make("tbody", {}, ...rows))] : [];
}

function showCharts() {
  const focus = document.activeElement.dataset.name;
  const names = [...new Set(data.runs.flatMap((run) => Object.keys(run.series)))].filter((key) => key !== STEP && !key.startsWith("axis/")), count = WINDOWS[byId("smooth").value];
  const metrics = chosenMetrics(names, data.charts, byId("metric").value, view.pin), some = metrics.slice(0, mostCharts), logged = data.runs.some((run) => run.rows);
  byId("smoothed").textContent = count > 1 ? `means of ${count} points, the points behind` : "off";
  if (!fill("curves", some.map(chart))) within("curves", ".charts").append(make("p", { class: "none" }, !logged ? "No step has been logged yet." : metrics.length ? "No run is shown." : "No metric fits."));
  const marked = data.runs.some((run) => (run.series[LEVEL] || []).some((level) => level)) ? [make("span", { class: "text1" }, "\u25b2 watch"), make("span", { class: "text2" }, "\u25c6 bad")] : [];
  const thinned = shownRuns().filter(({ run }) => run.rows > (run.series[STEP] || []).length).map(({ run }) => `${run.series[STEP].length} of ${run.rows} steps of ${run.name} are drawn`);
  const reset = view.zoom.length ? make("button", { type: "button", class: "small" }, "whole range") : null;
  if (reset) reset.addEventListener("click", zoomTo);
  byId("notes").replaceChildren(...marked, ...thinned.map((text) => make("small", {}, text)), ...(reset ? [reset] : []));
  for (const button of byId("key").children) button.setAttribute("aria-pressed", String(!view.hide.includes(button.dataset.run)));
  byId("moreCharts").hidden = metrics.length <= some.length;
  byId("moreCharts").textContent = `Show ${metrics.length - some.length} more`;
  within("numbers", ".list").replaceChildren(...table(some));
  byId("numbers").hidden = !logged;
  const sums = new Map(shownRuns().map(({ run }) => [run, bars(run).map((one) => one.parts.reduce((sum, part) => sum + part, 0))])), timed = shownRuns().filter(({ run }) => sums.get(run).length);
  byId("times").hidden = !fill("times", timed.map((one) => stacked(one, 1.02 * Math.max(0, ...[...sums.values()].flat()))));
  within("times", ".legend").replaceChildren(...phaseNames().map((name, phase) => make("span", {}, make("i", { class: tone(phase, phaseNames()) }), name)));
  byId("rewards").hidden = !fill("rewards", [...new Set(data.runs.flatMap((run) => Object.keys(run.histograms)))].sort().map(histogram));
  [...document.querySelectorAll("button[data-name]")].find((one) => one.dataset.name === focus)?.focus();
  saveLink();
}
