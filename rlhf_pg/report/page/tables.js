// Small tables of text: config, versions, differences.

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
