// Who was busy when: a row for each process, a colour for each thing done.
const LANE = 22, FOOT = 22, LABEL = 104, SHARE = 44, LANES = 24, TONES = 12;

let tones = new Map();  // class of each thing done, the same in all runs and windows

// Phases have the colours that they have above, then what takes longest; the rest is grey.
function setTones(runs) {
  const sums = new Map(phaseNames().slice(0, -1).map((name) => [name, Infinity]));
  for (const { steps, names } of runs.map((run) => run.timeline)) for (const [, what, from, to] of steps.flatMap((step) => step.spans))
    sums.set(names[what], (sums.get(names[what]) || 0) + to - from);
  const order = [...sums].sort(([, one], [, other]) => (one === other ? 0 : other - one)).map(([name]) => name);
  tones = new Map(order.map((name, place) => [name, place < TONES ? `tone${place}` : "rest"]));
}

function toneOf(name) { return tones.get(name); }

// The steps that are asked for, of those that are here.
function shownSteps({ steps, windows }) {
  const [first, length] = windows[byId("window").value], count = Math.min(+byId("count").value, length);
  const start = { first, middle: first + ((length - count) >> 1), last: first + length - count, worst: first }[byId("window").value];
  return steps.slice(start, start + count);
}

// Rows of the processes, the run's phases first: spans in seconds from the first step's start on, and their share of the time.
function lanes({ names }, steps) {
  const origin = steps[0].start, end = steps[steps.length - 1].start + steps[steps.length - 1].seconds - origin, found = new Map([["run", []]]);
  for (const { step, start, spans } of steps) for (const [who, what, from, to] of spans) {
    if (!found.has(names[who])) found.set(names[who], []);
    found.get(names[who]).push({ step, what: names[what], from: from + start - origin, to: to + start - origin });
  }
  return { end, rows: [...found].filter(([, spans]) => spans.length).map(([who, spans]) => ({ who, spans, busy: covered(spans) / end })).sort(byName) };
}

function byName(one, other) {
  const rank = ({ who }) => (who === "run" ? 0 : /^(rewards|environments)$/.test(who) ? 2 : 1);
  return rank(one) - rank(other) || one.who.localeCompare(other.who, "en", { numeric: true });
}

// Seconds in which at least one of the spans lasts.
function covered(spans) {
  let sum = 0, until = -Infinity;
  for (const { from, to } of [...spans].sort((one, other) => one.from - other.from)) {
    sum += Math.max(0, to - Math.max(from, until));
    until = Math.max(until, to);
  }
  return sum;
}

function timelineOf(run) {
  const steps = shownSteps(run.timeline), { end, rows } = lanes(run.timeline, steps), few = rows.slice(0, LANES);
  const told = `${steps.length > 1 ? `steps ${steps[0].step} to ${steps[steps.length - 1].step}` : `step ${steps[0].step}`}, ${words(+end.toPrecision(3))} s; at the right, the share of the time in which each was busy`;
  return figure(run.name, told + (rows.length > LANES ? `; ${rows.length - LANES} more processes are not shown` : ""), (box, width, tell) => {
    const bottom = few.length * LANE, svg = box.appendChild(make("svg:svg", { viewBox: `0 0 ${width} ${bottom + FOOT}`, height: bottom + FOOT, role: "img", "aria-label": `Spans of ${run.name}` }));
    const x = (seconds) => LABEL + (seconds / (end || 1)) * (width - LABEL - SHARE);
    few.forEach((row, place) => {
      const y = place * LANE;
      svg.append(make("svg:rect", { x: LABEL, y: y + 3, width: width - LABEL - SHARE, height: LANE - 6, class: "idle" }),
        make("svg:text", { x: LABEL - 8, y: y + 15, "text-anchor": "end" }, row.who.length > 16 ? `${row.who.slice(0, 15)}\u2026` : row.who),
        make("svg:text", { x: width - 4, y: y + 15, "text-anchor": "end", class: "busy" }, `${Math.round(100 * row.busy)}%`));
      for (const span of [...row.spans].sort((one, other) => other.to - other.from - (one.to - one.from))) {
        const bar = svg.appendChild(make("svg:rect", { x: x(span.from).toFixed(1), y: y + 3, width: Math.max(x(span.to) - x(span.from), 0.7).toFixed(1), height: LANE - 6, class: toneOf(span.what) }));
        bar.addEventListener("pointerenter", () => tell(`${row.who}: ${span.what}`, `${words(+(span.to - span.from).toPrecision(3))} s in step ${span.step}`, `busy ${Math.round(100 * row.busy)}% of the time shown`));
      }
    });
    let free = -Infinity;  // where the next number of a step has room
    for (const { step, start } of steps) {
      const place = x(start - steps[0].start);
      svg.append(make("svg:path", { d: `M${place} 0V${bottom + 4}`, class: "hair" }));
      if (place > free) { svg.append(make("svg:text", { x: place + 3, y: bottom + 15 }, String(step))); free = place + 34; }
    }
  });
}

function showTimeline() {
  const runs = shownRuns().map(({ run }) => run).filter((run) => run.timeline);
  setTones(data.runs.filter((run) => run.timeline));
  byId("timeline").hidden = !fill("timeline", runs.map(timelineOf));
  const done = new Set(runs.flatMap((run) => lanes(run.timeline, shownSteps(run.timeline)).rows.flatMap((row) => row.spans.map((span) => span.what))));
  const [named, others] = [true, false].map((wanted) => [...tones].filter(([name, tone]) => done.has(name) && (tone !== "rest") === wanted));
  const legend = [...named, ...(others.length ? [[`${others.length} shorter ones`, "rest"]] : [])];
  within("timeline", ".legend").replaceChildren(...legend.map(([name, tone]) => make("span", {}, make("i", { class: tone }), name)));
  byId("memory").hidden = !fill("memory", shownRuns().filter(({ run }) => run.memory).map(memoryOf));
}

