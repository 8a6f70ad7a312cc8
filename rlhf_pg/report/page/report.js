// The page: a head, known trouble, and tabs of curves, tokens and tables.

const data = JSON.parse($("data").textContent);
const curves = data.runs.length ? new Curves(data) : null;
const tokens = data.steps ? new Tokens(data, loadStep) : null;
const tabs = {};
let shown = null;

/** The packed bytes of a step. */
async function loadStep(step) {
  // They stand behind this script.
  if (document.readyState === "loading") await new Promise((done) => document.addEventListener("DOMContentLoaded", done));
  const element = $(`step-${step}`);
  if (!element) throw new Error("it is not in this page");
  return bytesOf(element);
}

/** What the run is, in a few words each. */
function facts() {
  const parts = data.subtitle.flatMap((part, i) => (i ? [el("span", { className: "dot" }, "·"), part] : [part]));
  return el("p", { id: "facts" }, ...parts);
}

function head() {
  const names = [["curves", "Curves", curves], ["tokens", "Tokens", tokens], ["tables", { run: "Run", compare: "Differences" }[data.kind] || "Details", data.tables.length]];
  const links = names.filter(([, , is]) => is).map(([name, text]) => {
    const link = el("a", { href: `#${name}`, onclick: (event) => { event.preventDefault(); open(name); } }, text);
    tabs[name] = { link };
    return link;
  });
  const help = el("button", { type: "button", className: "help", title: "keys (?)", onclick: () => $("keys").showModal() }, "?");
  return el("header", { className: "top" },
    el("div", { className: "title" }, el("h1", {}, data.title), facts()),
    el("nav", {}, ...links, help));
}

function trouble() {
  const notes = data.warnings;
  if (data.kind !== "run" || !data.charts.length) return el("div", { id: "trouble" });
  if (!notes.length) return el("p", { id: "trouble", className: "fine" }, "No known trouble in these curves.");
  return el("div", { id: "trouble", className: "troubles" }, ...notes.map((note) =>
    el("a", { href: "#curves", className: note.until === null ? "" : "over", onclick: (event) => { event.preventDefault(); open("curves"); curves.show(note.key); } },
      el("strong", {}, note.title), el("span", {}, ` ${stretch(note)}: `), el("code", {}, note.key))));
}

function keysHelp() {
  const rows = [
    ...(tokens ? [
      ["← →", "logged step before, after"], ["↑ ↓", "prompt before, after"],
      ...data.columns.map((column, i) => [column.key ? `${column.key} or ${i + 1}` : String(i + 1), `colour by ${column.label}: ${column.what || column.label}`]),
      ["t", "tokens"]] : []),
    ...(curves ? [["c", "curves"]] : []), ["i", "tables"], ["?", "these keys"],
  ];
  return el("dialog", { id: "keys", onclick: (event) => { if (event.target.id === "keys") event.target.close(); } },
    el("h2", {}, "Keys"),
    el("dl", {}, ...rows.map(([key, what]) => el("div", {}, el("dt", {}, el("kbd", {}, key)), el("dd", {}, what)))),
    el("form", { method: "dialog" }, el("button", {}, "close")));
}

/** Show a tab. */
function open(name) {
  if (!tabs[name]) return;
  shown = name;
  for (const [other, { link, root }] of Object.entries(tabs)) {
    root.hidden = other !== name;
    link.setAttribute("aria-current", String(other === name));
  }
  document.body.dataset.tab = name;
  history.replaceState(null, "", `#${name}`);
  if (name === "tokens" && !tokens.step) tokens.go(data.steps.length - 1);
}

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || $("keys").open) return;
  const isField = event.target.matches?.("input:not([type=range]), textarea");
  if (isField) return;
  if (event.key === "?") $("keys").showModal();
  else if (shown === "tokens" && tokens.key(event.key)) event.preventDefault();
  else if (event.key === "t") open("tokens");
  else if (event.key === "c") open("curves");
  else if (event.key === "i") open("tables");
}

function build() {
  const top = head();
  if (tabs.curves) tabs.curves.root = curves.root;
  if (tabs.tokens) tabs.tokens.root = data.steps.length ? tokens.root
    : el("section", {}, el("p", { className: "empty" }, "No completions have been logged yet: log_completions_steps says how often they are."));
  if (tabs.tables) tabs.tables.root = tablesOf(data.tables);
  document.body.append(top, trouble(), el("main", {}, ...Object.values(tabs).map((tab) => tab.root)), keysHelp());
  document.addEventListener("keydown", onKey);
  const wanted = location.hash.slice(1);
  open(tabs[wanted] ? wanted : Object.keys(tabs)[0]);
}

/** Mark the page as drawn, for whoever waits for it. */
function ready() {
  requestAnimationFrame(() => requestAnimationFrame(() => { document.body.dataset.ready = "true"; }));
}

build();
if (curves && shown === "curves" && data.charts.length) curves.onFirst = ready;
else ready();
// The run writes the page again while it goes on; whoever reads tokens is left in peace.
if (data.running) setInterval(() => { if (shown !== "tokens") location.reload(); }, 10000);
