
// Transcripts: found by what is asked for, turn by turn, or token by token in colours.
const NUMBERS = { logprob: "log-prob", log_ratio: "mismatch (log-ratio)", advantage: "advantage", entropy: "entropy" }, SHADES = 5;
const SIDES = { entropy: [0, SHADES], logprob: [-SHADES, 0] };  // of the scale, where one is empty
const LEAST = { log_ratio: 0.01 };  // of what has full colour: below, it is rounding

let pattern = null;  // of the text that is searched for

function marked(text) { return pieces(text, pattern).map(([piece, hit]) => (hit ? make("mark", {}, piece) : piece)); }

function said(role, text, kind = role, folded = false) {
  const name = make("b", {}, role), whole = make("pre", {}, ...marked(words(text))), open = byId("unfold").checked || whole.querySelector("mark") ? "" : undefined;
  if (!folded) return make("div", { class: `turn ${kind}` }, name, whole);
  return make("details", { class: `turn ${kind}`, open }, make("summary", {}, name, make("span", { class: "start" }, words(text).slice(0, 200))), whole);
}

function turn(message) {
  if (typeof message !== "object" || message === null) return [said("more", message)];
  const calls = listOf(message.tool_calls), role = words(message.role);
  const content = typeof message.content === "object" && message.content !== null ? JSON.stringify(message.content) : message.content;
  const spoken = content || !calls.length ? [said(message.name ? `${role} ${message.name}` : role, content || "", role.replace(/\W/g, ""), message.role === "tool")] : [];
  return [...spoken, ...calls.map((call) => { const to = (call && call.function) || call || {}; return said(`calls ${words(to.name)}`, typeof to.arguments === "string" ? to.arguments : JSON.stringify(to.arguments), "call", true); })];
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

function coloured(sequences, colouring, least) {
  const { read, value, most: own, known } = tokensOf(sequences, colouring), most = Math.max(own, least);
  if (!known) return [make("p", { class: "none" }, `Its ${NUMBERS[colouring]} was not recorded.`)];
  const [low, high] = SIDES[colouring] || [-SHADES, SHADES], scale = Array.from({ length: high - low + 1 }, (_, n) => make("i", { class: `shade${SHADES + low + n}` }));
  const key = make("p", { class: "scale" }, words(low && +(-most).toPrecision(3)), " ", ...scale, ` ${words(high && +most.toPrecision(3))} ${NUMBERS[colouring]}`);
  const boxes = read.map(({ tokens, leftOut }, n) => make("div", { class: "turn assistant" }, make("b", {}, read.length > 1 ? `sequence ${n + 1}` : "tokens"),
    make("pre", {}, ...tokens.map((one) => token(one, value(one), most)), leftOut ? make("span", { class: "inserted" }, ` [${leftOut} tokens left out]`) : null)));
  return [key, ...boxes];
}

function roleOf(one) { return one && one.role ? `: ${words(one.role)}` : ""; }

// Each conversation of an episode with what it began with; what the last reply was answered stands at the end.
function spoken(conversations, turns) {
  const heard = listOf(turns).slice(listOf(turns).findLastIndex((one) => one && one.role === "assistant") + 1);
  const boxes = conversations.map((one, n) => make("div", { class: "conversation" }, make("h3", {}, typeof one === "string" ? one : `conversation ${words((one || {}).number ?? n + 1)} of ${conversations.length}${roleOf(one)}`),
    ...[...listOf((one || {}).prompt), ...listOf((one || {}).turns)].flatMap(turn)));
  return [...boxes, ...heard.flatMap(turn)];
}

function replies(run, place, colouring, least = 0) {
  const { turns, reply, conversations } = run.transcripts[place];
  const plain = () => (Array.isArray(conversations) ? spoken(conversations, turns) : Array.isArray(turns) ? turns.flatMap(turn) : [said("assistant", reply)]);
  if (!colouring) return plain();
  const sequences = run.tokens[place];
  return sequences ? coloured(sequences, colouring, least) : [make("p", { class: "none" }, "Numbers of its tokens are not here."), ...plain()];
}

function picturesOf(one) { return listOf(one.images); }

function pictures(run, one) {
  const names = picturesOf(one), nodes = names.map((name, n) => Object.hasOwn(run.pictures, name)
    ? make("img", { src: run.pictures[name], alt: `picture ${n + 1} of the prompt` })
    : make("small", {}, /^\[/.test(name) ? name : `[picture ${n + 1} is not on this page]`));
  return nodes.length ? [make("p", { class: "pictures" }, ...nodes)] : [];
}

const HEAD = ["step", "group", "purpose", "outcome", "prompt", "images", "reply", "label", "turns", "conversations", "reward"];

// All that is known of a transcript; `least` is a lower bound of the colours' scale.
function body({ run, place }, least) {
  const one = run.transcripts[place], { prompt, label } = one, rest = Object.entries(one).filter(([name]) => !HEAD.includes(name)), asked = said("prompt", prompt, "user");
  asked.append(...pictures(run, one));
  return [asked, ...replies(run, place, byId("colouring").value, least), label === null || label === undefined ? "" : said("label", typeof label === "object" ? JSON.stringify(label) : label),
    make("p", { class: "numbers" }, [`${run.lengths[place]} characters`, ...rest.map(([name, value]) => `${name} ${words(value)}`)].join(" \u00b7 "))];
}

function action(text, entry, act, on = false) {
  const button = make("button", { type: "button", class: "small", "aria-pressed": String(on) }, text);
  button.addEventListener("click", () => act(entry));
  return button;
}

function transcript(entry) {
  const { run, place, key } = entry, one = run.transcripts[place], reward = make("span", { class: "reward" }, words(one.reward));
  const line = make("summary", {}, reward, make("span", { class: "outcome" }, words(one.outcome)), make("span", { class: "start" }, ...marked(words(one.reply).trim().slice(0, 300) || "(empty)")));
  const box = make("details", { "data-key": key }, line), fill = () => {
    if (box.childElementCount === 1) box.append(make("p", { class: "tools" }, action("compare", entry, compare, view.pair.includes(key)), action("same prompt", entry, alike, view.same.includes(key))), ...body(entry));
  };
  box.addEventListener("toggle", () => {
    if (box.open) fill();
    if (box.open !== view.open.includes(key)) view.open = box.open ? [...view.open, key] : view.open.filter((other) => other !== key);
    saveLink();
  });
  if (view.open.includes(key)) { fill(); box.open = true; }
  return box;
}

// Put a completion beside another, or take it away; a third replaces the second.
function compare({ key }) {
  view.pair = view.pair.includes(key) ? view.pair.filter((one) => one !== key) : [...view.pair.slice(0, 1), key];
  showPair();
  saveLink();
}

// Show the completions of one prompt only, of all runs and steps.
function alike({ key }) {
  view.same = view.same.includes(key) ? [] : [key];
  showTranscripts();
  stepTo(0, key);
}

function showPair() {
  const chosen = view.pair.map((key) => entries.get(key)).filter(Boolean), colouring = byId("colouring").value;
  const least = Math.max(0, ...chosen.map(({ run, place }) => (colouring && run.tokens[place] ? tokensOf(run.tokens[place], colouring).most : 0)));
  const columns = chosen.map((entry) => {
    const { run, number, place } = entry, one = run.transcripts[place], facts = [`step ${one.step}`, words(one.purpose), words(one.outcome), `reward ${words(one.reward)}`].join(", ");
    return make("article", {}, make("h3", {}, swatch(number), run.name, make("small", {}, ` ${facts} `), action("remove", entry, compare)), ...body(entry, least));
  });
  if (columns.length === 1) columns.push(make("p", { class: "none" }, "Choose a second completion: open one and press its button, or use the key c."));
  byId("pair").replaceChildren(...columns);
  byId("pair").hidden = !columns.length;
  for (const box of document.querySelectorAll("#transcripts details[data-key] > .tools")) box.firstChild.setAttribute("aria-pressed", String(view.pair.includes(box.parentElement.dataset.key)));
}

// The completion that has the focus, if any.
function focused() { return document.activeElement.closest("#transcripts details[data-key]"); }

function onFocused(act) { if (focused()) act(entries.get(focused().dataset.key)); }

// Go to the next completion or the one before; or to one by its key.
function stepTo(by, key = focused() && focused().dataset.key) {
  const boxes = () => [...document.querySelectorAll("#transcripts details[data-key]")], now = boxes().findIndex((one) => one.dataset.key === key);
  if (now + by >= boxes().length && !byId("more").hidden) byId("more").click();
  const to = boxes()[now < 0 ? 0 : now + by];
  if (!to) return;
  to.firstChild.focus({ preventScroll: true });
  to.firstChild.scrollIntoView({ block: "nearest" });
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

function group(same) {
  const [{ run, number, place }] = same, { step, purpose, prompt } = run.transcripts[place];
  const head = make("p", { class: "head" }, swatch(number), make("span", { class: "step" }, `step ${step}`), make("span", { class: "purpose" }, words(purpose)), make("span", { class: "start" }, ...marked(words(prompt).slice(0, 300))));
  return make("div", { class: "group" }, head, ...pictures(run, run.transcripts[place]), ...same.map(transcript));
}

function wanted() {
  const same = entries.get(view.same[0]), values = ["run", "purpose", "outcome", "turns", "low", "high", "shortest", "longest", "from", "to"].map((id) => [id, byId(id).value]);
  return { ...Object.fromEntries(values), pattern, same: same && same.run.transcripts[same.place] };
}

function showTranscripts() {
  pattern = patternOf(byId("text").value);
  const asked = wanted(), list = within("transcripts", ".list"), found = [...entries.values()].filter(({ run, place }) => matches(run, place, asked)), kept = [];
  found.sort((one, other) => other.run.transcripts[other.place].step - one.run.transcripts[one.place].step);
  for (const same of groupsOf(found)) if (kept.flat().length < shown) kept.push(same);
  list.replaceChildren(...kept.map(group));
  if (!found.length) list.append(make("p", { class: "none" }, "No transcript fits."));
  const [here, all] = data.runs.reduce(([some, sum], run) => [some + run.transcripts.length, sum + run.transcript_count], [0, 0]);
  const named = data.runs.flatMap((run) => [...new Set(run.transcripts.flatMap(picturesOf))].map((name) => Object.hasOwn(run.pictures, name))), absent = named.filter((here) => !here).length;
  within("transcripts", "h2 small").textContent = `${found.length} of the ${here} here${here < all ? `, groups chosen evenly from ${all}` : ""}; the latest first${asked.same ? "; of one prompt only" : ""}${absent ? `; ${absent} of ${named.length} pictures left out` : ""}`;
  byId("more").hidden = found.length <= kept.flat().length;
  byId("colouring").parentElement.hidden = !data.runs.some((run) => Object.keys(run.tokens).length);
  byId("anyPrompt").hidden = !asked.same;
  showPair();
  saveLink();
}

