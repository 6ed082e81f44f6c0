
// The page: what all its parts share, links, keys, configuration, and the start.
const STEP = "step", LEVEL = "health/level", PAGE = 40, POLL_MILLISECONDS = 3000, THEMES = ["", "dark", "light"];
const controls = [...document.querySelectorAll("form input, form select")], usual = new Map();  // values before anyone chose
const view = { pin: [], log: [], hide: [], zoom: [], sort: [], open: [], pair: [], same: [], theme: [], at: [] };  // what a link holds besides
const entries = new Map();  // transcripts by key: the run and the place of its line, which stay the same while it is written
let data = taken(JSON.parse(byId("data").textContent)), shown = PAGE, mostCharts = CHARTS;

function byId(id) { return document.getElementById(id); }
function within(id, selector) { return document.querySelector(`#${id} ${selector}`); }

function make(name, attributes = {}, ...children) {
  const [space, tag] = name.includes(":") ? ["http://www.w3.org/2000/svg", name.split(":")[1]] : ["http://www.w3.org/1999/xhtml", name];
  const node = document.createElementNS(space, tag);
  for (const [key, value] of Object.entries(attributes)) if (value !== undefined) node.setAttribute(key, value);
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

// Objects without inherited names: a metric or a key may be called "constructor".
function taken(found) {
  for (const run of found.runs) for (const name of ["series", "summary", "config", "histograms", "pictures", "tokens"]) Object.setPrototypeOf(run[name], null);
  for (const name of ["charts", "better"]) Object.setPrototypeOf(found[name], null);
  entries.clear();
  found.runs.forEach((run, number) => run.starts.forEach((start, place) => entries.set(`${run.name}@${start}`, { run, number, place, key: `${run.name}@${start}` })));
  return found;
}

function valueOf(control) { return control.type === "checkbox" ? String(control.checked) : control.value; }

// The address says what is shown: a reload or a copy of it shows the same.
function saveLink() {
  const changed = controls.filter((one) => valueOf(one) !== usual.get(one)).map((one) => [one.id, [valueOf(one)]]), link = linkOf({ ...Object.fromEntries(changed), ...view });
  if (link !== location.hash.slice(1)) history.replaceState(null, "", link ? `#${link}` : location.pathname + location.search);
}

function loadLink() {
  const found = listsOf(location.hash.slice(1), [...Object.keys(view), ...controls.map((one) => one.id)]);
  for (const key of Object.keys(view)) view[key] = found[key];
  if (!(+view.zoom[0] < +view.zoom[1])) view.zoom = [];
  for (const one of controls) {
    const [value = usual.get(one)] = found[one.id];
    if (one.type === "checkbox") one.checked = value === "true"; else one.value = value;
    if (one.selectedIndex === -1) one.value = usual.get(one);
  }
  setTheme(view.theme[0]);
}

function setTheme(name) {
  view.theme = THEMES.includes(name) && name ? [name] : [];
  document.documentElement.dataset.theme = view.theme[0] || "";
  byId("theme").textContent = `theme: ${view.theme[0] || "of the system"}`;
}

function nextTheme() {
  setTheme(THEMES[(THEMES.indexOf(view.theme[0] || "") + 1) % THEMES.length]);
  showRuns();
}

function goTo(id) {
  view.at = [id];
  saveLink();
  byId(id).scrollIntoView();
  byId(id).focus({ preventScroll: true });
}

function seek(id) {
  byId(id).scrollIntoView({ block: "center" });
  byId(id).focus();
}

function turnOver(id) {
  byId(id).checked = !byId(id).checked;
  byId(id).dispatchEvent(new Event("input", { bubbles: true }));
}

const KEYS = [
  [["j", "ArrowDown"], "next completion (an arrow: from the one that has the focus)", () => stepTo(1)],
  [["k", "ArrowUp"], "the one before", () => stepTo(-1)],
  [["Enter"], "open or close it", null],
  [["c"], "compare it: two completions stand side by side", () => onFocused(compare)],
  [["s"], "all completions of its prompt, of every run and step; again for all", () => onFocused(alike)],
  [["t"], "unfold tool calls, or fold them", () => turnOver("unfold")],
  [["/"], "search in transcripts", () => seek("text")],
  [["m"], "find a metric", () => seek("metric")],
  [["d"], "dark, light, or as the system is", nextTheme],
  [["?"], "these keys", () => byId("help").showModal()],
  [["Escape"], "leave a field, or this list", () => document.activeElement.blur()],
];

function pressed(event) {
  const typing = event.target.closest("input:not([type=range], [type=checkbox]), select"), [, , act] = KEYS.find(([names]) => names.includes(event.key)) || [];
  if (!act || event.ctrlKey || event.metaKey || event.altKey || byId("help").open || (typing && event.key !== "Escape")) return;
  if (event.key.startsWith("Arrow") && !event.target.closest("#transcripts summary")) return;
  event.preventDefault();
  act();
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
    run.verified ? make("details", { class: "plan" }, make("summary", {}, "verified: what holds for its model"), make("pre", {}, run.verified)) : null,
    run.findings.length ? make("details", { class: "findings" }, make("summary", {}, `${run.findings.length} findings`),
      make("ul", {}, ...run.findings.map(({ step, level, code, what, why, key }) => make("li", {},
        `step ${step}, ${level} (${code}): ${[what, why, key].filter(Boolean).join("; ")}`)))) : null);
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

function show() {
  byId("runs").replaceChildren(...data.runs.map(card));
  byId("key").replaceChildren(...legend());
  byId("transcripts").hidden = !data.runs.some((run) => run.transcripts.length);
  showCharts();
  showTimeline();
  showTranscripts();
  showRest();
  showConfiguration();
  for (const link of document.querySelectorAll("nav a")) link.hidden = byId(link.hash.slice(1)).hidden;
}

// Before a link is read, which may name any of them.
function showChoices() {
  byId("names").replaceChildren(...[...new Set(data.runs.flatMap((run) => Object.keys(run.series)))].sort().map((value) => make("option", { value })));
  choices("run", data.runs.map((run) => run.name));
  for (const key of ["purpose", "outcome"]) choices(key, data.runs.flatMap((run) => run.transcripts.map((one) => String(one[key]))));
}

async function poll() {
  try {
    const answer = await fetch(`data?known=${data.stamp}`);
    if (answer.status === 200) { data = taken(await answer.json()); showChoices(); show(); }
    byId("live").textContent = answer.ok ? "live" : "no longer served";
  } catch { byId("live").textContent = "no longer served"; }
}

let width = innerWidth;
addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; showRuns(); } });
addEventListener("hashchange", () => { loadLink(); show(); });
addEventListener("keydown", pressed);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", showRuns);
for (const form of document.forms) form.addEventListener("submit", (event) => event.preventDefault());
for (const id of ["curves", "numbers"]) within(id, "form").addEventListener("input", () => { mostCharts = CHARTS; showCharts(); });
within("timeline", "form").addEventListener("change", () => { showTimeline(); saveLink(); });
within("transcripts", "form").addEventListener("input", () => { shown = PAGE; showTranscripts(); });
within("configuration", "form").addEventListener("input", () => { showConfiguration(); saveLink(); });
for (const links of document.querySelectorAll("nav, .skip")) links.addEventListener("click", (event) => { if (event.target.hash) { event.preventDefault(); goTo(event.target.hash.slice(1)); } });
byId("align").addEventListener("input", () => { view.zoom = []; });  // before its form hears of it
byId("anyPrompt").addEventListener("click", () => { view.same = []; showTranscripts(); });
byId("more").addEventListener("click", () => { shown += PAGE; showTranscripts(); });
byId("moreCharts").addEventListener("click", () => { mostCharts += CHARTS; showCharts(); });
byId("theme").addEventListener("click", nextTheme);
byId("keys").addEventListener("click", () => byId("help").showModal());
within("help", "dl").append(...KEYS.map(([names, text]) => make("div", {}, make("dt", {}, ...names.map((name) => make("kbd", {}, name))), make("dd", {}, text))));
byId("smooth").value = String(WINDOWS.indexOf(data.mean));
for (const one of controls) usual.set(one, valueOf(one));
showChoices();
loadLink();
show();
queueMicrotask(() => { if (view.at.length && byId(view.at[0])) byId(view.at[0]).scrollIntoView(); });  // once charts have their heights
if (data.stamp) { byId("live").textContent = "live"; setInterval(poll, POLL_MILLISECONDS); }
document.documentElement.dataset.drawn = Math.round(performance.now());  // milliseconds
