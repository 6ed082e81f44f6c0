"use strict";
// What the page computes of values alone: curves, orders, searches and links. Texts of runs become text nodes only, never markup.

const WINDOWS = [1, 2, 5, 10, 20, 50, 100, 200], UNFINISHED = "not finished";  // points of a mean; all outcomes but one

function words(value) {
  if (value === null || value === undefined) return "none";
  if (typeof value !== "number") return String(value);
  const size = Math.abs(value);
  if (size >= 10000) return new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 4 }).format(value);
  return size && size < 0.001 ? value.toExponential(1).replace(".0e", "e") : String(+value.toPrecision(4));
}

// Values with the mean of the last `count` points up to each; of fewer, if not every step has one. A log axis has no place for 0.
function points(xs, ys, count, log = false) {
  const most = Math.max(Math.round((count * ys.filter((y) => y !== null).length) / ys.length), 1), kept = [], recent = [];
  ys.forEach((y, place) => {
    if (y === null || xs[place] === null) return;
    recent.push(y);
    if (recent.length > most) recent.shift();
    kept.push({ x: xs[place], y: recent.reduce((sum, one) => sum + one, 0) / recent.length, raw: y, place });
  });
  return log ? kept.filter((one) => one.y > 0) : kept;
}

function nearest(list, x) {
  let low = 0, high = list.length - 1;
  while (high - low > 1) { const middle = (low + high) >> 1; if (list[middle].x < x) low = middle; else high = middle; }
  return Math.abs(list[low].x - x) <= Math.abs(list[high].x - x) ? list[low] : list[high];
}

// Stretches of points with the same level above 0, each as places in the list.
function stretches(list, levels) {
  const level = (one) => levels[one.place] || 0, found = [];
  for (let from = 0, end; from < list.length; from = end) {
    for (end = from + 1; end < list.length && level(list[end]) === level(list[from]);) end += 1;
    if (level(list[from])) found.push({ level: level(list[from]), from, end });
  }
  return found;
}

// Unit and scale of the seconds of an axis.
function unitOf(axis, most) {
  if (axis !== "axis/seconds") return ["", 1];
  return most > 7200 ? [" h", 3600] : most > 120 ? [" min", 60] : [" s", 1];
}

// Metrics with every word in their name or title, those that are pinned first; without a word, the main ones.
function chosenMetrics(names, charts, text, pinned) {
  const asked = text.toLowerCase().split(/\s+/).filter(Boolean), said = (name) => `${name} ${charts[name] || ""}`.toLowerCase();
  const found = asked.length ? names.filter((name) => asked.every((word) => word === "*" || said(name).includes(word))) : Object.keys(charts);
  return [...new Set([...pinned, ...found])].filter((name) => names.includes(name));
}

// A number of a run's summary: [last, its step, lowest, its step, highest, its step].
function summaryOf(run, metric, kind, better) {
  const found = run.summary[metric], place = { last: 0, lowest: 2, highest: 4, best: { lower: 2, higher: 4 }[better] }[kind];
  return found && place !== undefined ? { value: found[place], step: found[place + 1] } : null;
}

// Runs in the order of a column; those without a number are last either way.
function sorted(entries, value, down) {
  const known = (one) => value(one) !== null && value(one) !== undefined;
  const order = (one, other) => (value(one) < value(other) ? -1 : value(one) > value(other) ? 1 : 0) * (down ? -1 : 1);
  return [...entries.filter(known).sort(order), ...entries.filter((one) => !known(one))];
}

function texts(value) {
  if (typeof value === "object" && value !== null) return Object.values(value).flatMap(texts);
  return value === null || value === undefined ? [] : [String(value)];
}

function patternOf(text) { return text ? new RegExp(text.replace(/[.*+?^${}()|[\]\\/]/g, "\\$&"), "giu") : null; }

// A text in pieces, and which of them are hits.
function pieces(text, pattern) {
  const found = [];
  let end = 0;
  for (const hit of pattern ? text.matchAll(pattern) : []) {
    if (hit.index > end) found.push([text.slice(end, hit.index), false]);
    found.push([hit[0], true]);
    end = hit.index + hit[0].length;
  }
  return end < text.length || !found.length ? [...found, [text.slice(end), false]] : found;
}

function listOf(value) { return Array.isArray(value) ? value : []; }

function callsTools(message) { return Boolean(message && (listOf(message.tool_calls).length || message.role === "tool")); }

function hasTools(one) { return [...listOf(one.turns), ...listOf(one.conversations).flatMap((inner) => listOf(inner && inner.turns))].some(callsTools); }

const KINDS = {  // of transcripts, by their turns
  tools: hasTools, plain: (one) => !hasTools(one), several: (one) => listOf(one.turns).length > 1,
  conversations: (one) => listOf(one.conversations).length > 1, pictures: (one) => listOf(one.images).length > 0,
};
const searched = new WeakMap();  // texts of transcripts

function between(value, low, high) {
  if (low === "" && high === "") return true;
  return typeof value === "number" && (low === "" || value >= +low) && (high === "" || value <= +high);
}

function samePrompt(one, other) { return JSON.stringify([one.prompt, one.images]) === JSON.stringify([other.prompt, other.images]); }

function matches(run, place, wanted) {
  const one = run.transcripts[place], { outcome, turns, same } = wanted;
  if ((wanted.run && wanted.run !== run.name) || (wanted.purpose && wanted.purpose !== String(one.purpose))) return false;
  if (outcome && (outcome === UNFINISHED ? one.outcome === "finished" : outcome !== String(one.outcome))) return false;
  if (!between(one.reward, wanted.low, wanted.high) || !between(run.lengths[place], wanted.shortest, wanted.longest)) return false;
  if (!between(one.step, wanted.from, wanted.to) || (turns && !KINDS[turns](one)) || (same && !samePrompt(one, same))) return false;
  if (!wanted.pattern) return true;
  if (!searched.has(one)) searched.set(one, texts([one.prompt, one.reply, one.label, one.turns, one.conversations, one.step]).join("\n"));
  return searched.get(one).search(wanted.pattern) >= 0;
}

// The part of an address behind #: lists of texts by key. A word alone names a section.
function linkOf(lists) {
  return new URLSearchParams(Object.entries(lists).flatMap(([key, values]) => values.map((value) => [key, value]))).toString();
}

function listsOf(link, keys) {
  const found = new URLSearchParams(link.includes("=") ? link : link ? { at: link } : {});
  return Object.fromEntries(keys.map((key) => [key, found.getAll(key)]));
}
