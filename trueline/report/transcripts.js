"use strict";
// Draws the runs of the JSON beside it. Texts of runs become text nodes only, never markup.

// Transcripts: found by what is asked for, turn by turn, or token by token in colours.
const NUMBERS = { logprob: "log-prob", log_ratio: "log-ratio", advantage: "advantage", entropy: "entropy" }, SHADES = 5;
const LEAST = { log_ratio: 0.01 };  // of what has full colour: below, it is rounding

function matches(run, one) {
  const wanted = (id) => byId(id).value, low = wanted("low"), high = wanted("high");
  if (wanted("run") && wanted("run") !== run.name) return false;
  if (["purpose", "outcome"].some((key) => wanted(key) && wanted(key) !== String(one[key]))) return false;
  if ((low !== "" || high !== "") && typeof one.reward !== "number") return false;
  if ((low !== "" && one.reward < +low) || (high !== "" && one.reward > +high)) return false;
  const text = wanted("text").toLowerCase();
  return !text || JSON.stringify([one.prompt, one.reply, one.label, one.turns, one.conversations, one.step]).toLowerCase().includes(JSON.stringify(text).slice(1, -1));
}

function said(role, text, kind = role) {
  return make("div", { class: `turn ${kind}` }, make("b", {}, role), make("pre", {}, words(text)));
}

function turn(message) {
  if (typeof message !== "object" || message === null) return [said("more", message)];
  const calls = Array.isArray(message.tool_calls) ? message.tool_calls : [], role = words(message.role);
  const content = typeof message.content === "object" && message.content !== null ? JSON.stringify(message.content) : message.content;
  const spoken = content || !calls.length ? [said(message.name ? `${role} ${message.name}` : role, content || "", role.replace(/\W/g, ""))] : [];
  return [...spoken, ...calls.map((call) => { const to = (call && call.function) || call || {}; return said(`calls ${words(to.name)}`, typeof to.arguments === "string" ? to.arguments : JSON.stringify(to.arguments), "call"); })];
}

// Numbers of a column: base64 of float16, little-endian, or one number that all tokens share.
function unpacked(column, count) {
  if (typeof column !== "string") return Array(count).fill(column);
  let bytes = "";
  try { bytes = atob(column); } catch { return []; }
  return Array.from({ length: bytes.length >> 1 }, (_, n) => half(bytes.charCodeAt(2 * n) + 256 * bytes.charCodeAt(2 * n + 1)));
}

function half(bits) {
  const sign = bits & 0x8000 ? -1 : 1, exponent = (bits >> 10) & 31, fraction = bits & 1023;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (exponent ? 2 ** (exponent - 25) * (1024 + fraction) : 2 ** -24 * fraction);
}

// Sequences of an episode, each token with its numbers; the largest of the number that colours them.
function tokensOf(sequences, colouring) {
  const read = sequences.map((one) => {
    const columns = Object.keys(NUMBERS).filter((name) => one[name] !== undefined).map((name) => [name, unpacked(one[name], one.text.length)]);
    const sampled = one.sampled.flatMap((count, turn) => Array(Math.min(count, one.text.length)).fill(turn % 2 === 0));  // by turns
    const tokens = one.text.map((text, n) => ({ text, sampled: sampled[n], numbers: columns.map(([name, values]) => [name, values[n]]) }));
    return { tokens, leftOut: one.left_out };
  });
  const value = (token) => (token.numbers.find(([name]) => name === colouring) || [])[1];
  const sizes = read.flatMap((one) => one.tokens.filter((token) => token.sampled).map((token) => Math.abs(value(token)))).filter(Number.isFinite);
  return { read, value, most: Math.max(LEAST[colouring] || 0, ...sizes), known: sizes.length > 0 };
}

function token({ text, sampled, numbers }, number, most) {
  const shown = text.replace(/\n/g, "\u21b5\n") || "\u00b7";  // part of a character whose text stands behind it
  if (!sampled) return make("span", { class: "inserted", title: "inserted, not sampled" }, text);
  const shade = Number.isFinite(number) && most ? Math.round((SHADES * number) / most) : 0;
  const told = numbers.map(([name, value]) => `${NUMBERS[name]} ${words(+(+value).toPrecision(3))}`).join("\n");
  return make("span", { class: `token shade${SHADES + shade}`, title: told }, shown);
}

function coloured(sequences, colouring) {
  const { read, value, most, known } = tokensOf(sequences, colouring);
  if (!known) return [make("p", { class: "none" }, `Its ${NUMBERS[colouring]} was not recorded.`)];
  const low = colouring === "entropy" ? SHADES : 0, scale = Array.from({ length: 2 * SHADES + 1 - low }, (_, n) => make("i", { class: `shade${n + low}` }));
  const key = make("p", { class: "scale" }, words(low ? 0 : +(-most).toPrecision(3)), " ", ...scale, ` ${words(+most.toPrecision(3))} ${NUMBERS[colouring]}`);
  const boxes = read.map(({ tokens, leftOut }, n) => make("div", { class: "turn assistant" }, make("b", {}, read.length > 1 ? `sequence ${n + 1}` : "tokens"),
    make("pre", {}, ...tokens.map((one) => token(one, value(one), most)), leftOut ? make("span", { class: "inserted" }, ` [${leftOut} tokens left out]`) : null)));
  return [key, ...boxes];
}

function roleOf(one) { return one && one.role ? `: ${words(one.role)}` : ""; }

// Each conversation of an episode with what it began with; what the last reply was answered stands at the end.
function spoken(conversations, turns) {
  const listed = (value) => (Array.isArray(value) ? value : []), heard = listed(turns).slice(listed(turns).findLastIndex((one) => one && one.role === "assistant") + 1);
  const boxes = conversations.map((one, n) => make("div", { class: "conversation" }, make("h3", {}, typeof one === "string" ? one : `conversation ${words((one || {}).number ?? n + 1)} of ${conversations.length}${roleOf(one)}`),
    ...[...listed((one || {}).prompt), ...listed((one || {}).turns)].flatMap(turn)));
  return [...boxes, ...heard.flatMap(turn)];
}

function replies(run, place, colouring) {
  const { turns, reply, conversations } = run.transcripts[place];
  const plain = () => (Array.isArray(conversations) ? spoken(conversations, turns) : Array.isArray(turns) ? turns.flatMap(turn) : [said("assistant", reply)]);
  if (!colouring) return plain();
  const sequences = run.tokens[place];
  return sequences ? coloured(sequences, colouring) : [make("p", { class: "none" }, "Numbers of its tokens are not here."), ...plain()];
}

function picturesOf(one) { return Array.isArray(one.images) ? one.images : []; }

function pictures(run, one) {
  const names = picturesOf(one), nodes = names.map((name, n) => Object.hasOwn(run.pictures, name)
    ? make("img", { src: run.pictures[name], alt: `picture ${n + 1} of the prompt` })
    : make("small", {}, /^\[/.test(name) ? name : `[picture ${n + 1} is not on this page]`));
  return nodes.length ? [make("p", { class: "pictures" }, ...nodes)] : [];
}

const HEAD = ["step", "group", "purpose", "outcome", "prompt", "images", "reply", "label", "turns", "conversations", "reward"];

function transcript(run, place, key, open) {
  const one = run.transcripts[place], { outcome, prompt, label } = one, reward = make("span", { class: "reward" }, words(one.reward));
  const line = make("summary", {}, reward, make("span", { class: "outcome" }, words(outcome)), make("span", { class: "start" }, words(one.reply).trim().slice(0, 300) || "(empty)"));
  const box = make("details", { "data-key": key }, line), fill = () => {
    if (box.childElementCount > 1) return;
    const rest = Object.entries(one).filter(([name]) => !HEAD.includes(name));
    const asked = said("prompt", prompt, "user");
    asked.append(...pictures(run, one));
    box.append(asked, ...replies(run, place, byId("colouring").value), label === null || label === undefined ? "" : said("label", typeof label === "object" ? JSON.stringify(label) : label),
      make("p", { class: "numbers" }, rest.map(([name, value]) => `${name} ${words(value)}`).join("   ")));
  };
  box.addEventListener("toggle", fill);
  if (open) { fill(); box.open = true; }
  return box;
}

// Completions of one prompt in one step, of those that were found.
function groupsOf(found) {
  const groups = new Map();
  for (const entry of found) {
    const { step, purpose, group } = entry.run.transcripts[entry.place], name = group === undefined ? entry.key : JSON.stringify([entry.number, purpose, step, group]);
    groups.set(name, [...(groups.get(name) || []), entry]);
  }
  return [...groups.values()];
}

function group(entries, open) {
  const [{ run, number, place }] = entries, { step, purpose, prompt } = run.transcripts[place];
  const head = make("p", { class: "head" }, swatch(number), make("span", { class: "step" }, `step ${step}`), make("span", { class: "purpose" }, words(purpose)), make("span", { class: "start" }, words(prompt).slice(0, 300)));
  return make("div", { class: "group" }, head, ...pictures(run, run.transcripts[place]), ...entries.map((one) => transcript(one.run, one.place, one.key, open.has(one.key))));
}

function showTranscripts() {
  const list = within("transcripts", ".list"), open = new Set([...list.querySelectorAll("details[open]")].map((one) => one.dataset.key)), found = [];
  data.runs.forEach((run, number) => run.transcripts.forEach((one, place) => { if (matches(run, one)) found.push({ run, number, place, key: `${run.name} ${one.step} ${place}` }); }));
  found.sort((one, other) => other.run.transcripts[other.place].step - one.run.transcripts[one.place].step);
  const kept = [];
  for (const entries of groupsOf(found)) if (kept.flat().length < shown) kept.push(entries);
  list.replaceChildren(...kept.map((entries) => group(entries, open)));
  if (!found.length) list.append(make("p", { class: "none" }, "No transcript fits."));
  const [here, all] = data.runs.reduce(([some, sum], run) => [some + run.transcripts.length, sum + run.transcript_count], [0, 0]);
  const named = data.runs.flatMap((run) => [...new Set(run.transcripts.flatMap(picturesOf))].map((name) => Object.hasOwn(run.pictures, name))), absent = named.filter((here) => !here).length;
  within("transcripts", "h2 small").textContent = `${found.length} of the ${here} here${here < all ? `, groups chosen evenly from ${all}` : ""}; the latest first${absent ? `; ${absent} of ${named.length} pictures left out` : ""}`;
  byId("more").hidden = found.length <= kept.flat().length;
  byId("colouring").parentElement.hidden = !data.runs.some((run) => Object.keys(run.tokens).length);
}

