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

function head() {
  const names = [["curves", "Curves", curves], ["tokens", "Tokens", tokens], ["tables", { run: "Run", compare: "Differences" }[data.kind] || "Details", data.tables.length]];
  const links = names.filter(([, , is]) => is).map(([name, text]) => {
    const link = el("a", { href: `#${name}`, onclick: (event) => { event.preventDefault(); open(name); } }, text);
    tabs[name] = { link };
    return link;
  });
  return el("header", { className: "top" },
    el("div", { className: "title" }, el("h1", {}, data.title), el("p", {}, data.subtitle.join(" · "))),
    el("nav", {}, ...links));
}

function trouble() {
  const notes = data.warnings;
  if (data.kind !== "run" || !data.charts.length) return el("div", { id: "trouble" });
  if (!notes.length) return el("p", { id: "trouble", className: "fine" }, "No known trouble in these curves.");
  return el("div", { id: "trouble", className: "troubles" }, ...notes.map((note) =>
    el("a", { href: "#curves", className: note.until === null ? "" : "over", onclick: (event) => { event.preventDefault(); open("curves"); curves.show(note.key); } },
      el("strong", {}, note.title), el("span", {}, ` ${stretch(note)}: `), el("code", {}, note.key))));
}

function tablesOf(tables) {
  return el("section", { className: "tables" }, ...tables.map((table) =>
    el("section", { className: "table" }, el("h2", {}, table.title),
      table.note ? el("p", { className: "what" }, table.note) : null,
      table.rows.length ? el("div", { className: "scroll" }, el("table", {},
        el("thead", {}, el("tr", {}, ...table.head.map((name) => el("th", {}, name)))),
        el("tbody", {}, ...table.rows.map((row, i) =>
          el("tr", { className: i >= table.rows.length - table.dimmed ? "dimmed" : "" },
            ...row.map((cell) => el("td", {}, cell)))))))
        : table.note ? null : el("p", { className: "empty" }, "None."))));
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
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const isField = event.target.matches?.("input:not([type=range]), textarea");
  if (isField) return;
  if (shown === "tokens" && tokens.key(event.key)) event.preventDefault();
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
  document.body.append(top, trouble(), el("main", {}, ...Object.values(tabs).map((tab) => tab.root)));
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
