// Curves of one run, or of several over one another.

const COLOURS = {
  light: ["#0b62c4", "#d1495b", "#2a9134", "#9a5ccc", "#c97b12", "#0f8b8d", "#6b7280", "#b5179e"],
  dark: ["#6cb2ff", "#ff8a96", "#6fd07a", "#c79bf2", "#f0b45b", "#5fd0d2", "#a3abb8", "#ff85dd"],
};
const AXES = { step: "step", tokens: "tokens", time: "time" };
// Seconds between two ticks.
const ROUND_TIMES = [0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 36000, 86400, 172800, 432000, 864000];
const colour = (i) => { const all = COLOURS[isDark() ? "dark" : "light"]; return all[i % all.length]; };
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** The mean of the neighbours of each point, nearer ones counting more; gaps stay. */
function smoothed(y) {
  const reach = Math.max(2, Math.round(y.length / 50));
  return y.map((x, i) => {
    if (x === null || x === undefined) return null;
    let sum = 0, weight = 0;
    // Near the ends the window shrinks, so that a slope keeps its end, but not to a single point.
    const near = Math.max(Math.min(reach, i, y.length - 1 - i), Math.ceil(reach / 3));
    for (let j = Math.max(0, i - near); j <= Math.min(y.length - 1, i + near); j++) {
      const other = y[j], own = near + 1 - Math.abs(j - i);
      if (other !== null && other !== undefined) { sum += own * other; weight += own; }
    }
    return sum / weight;
  });
}

class Curves {
  constructor(data) {
    this.data = data;
    const steps = Math.max(0, ...data.runs.map((run) => run.x.step.length));
    this.options = { x: "step", smooth: steps >= 60 };
    this.range = null; // of x, where the reader has zoomed
    this.cards = [];
    this.root = el("section", { className: "curves" });
    this.seen = new IntersectionObserver((entries) => this.onSeen(entries), { rootMargin: "200px" });
    this.sized = new ResizeObserver(() => this.cards.filter(({ plot, u }) => u && plot.clientWidth && plot.clientWidth !== u.width).forEach((card) => this.draw(card)));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.redraw());
    this.build();
  }

  build() {
    this.root.append(this.controls());
    const { charts, absent } = this.data;
    if (!charts.length) {
      this.root.append(el("p", { className: "empty" }, "No step has been taken yet, so there are no curves."));
    }
    for (const group of [...new Set(charts.map((chart) => chart.group))]) {
      const grid = el("div", { className: "grid" });
      for (const chart of charts.filter((one) => one.group === group)) grid.append(this.card(chart));
      const count = grid.children.length;
      this.root.append(group === "Other"
        ? el("details", { className: "group" }, el("summary", {}, el("h2", {}, "Other"), ` ${count} more`), grid)
        : el("section", { className: "group" }, el("h2", {}, group), grid));
    }
    if (absent.length) {
      const names = absent.flatMap((name) => [el("code", {}, name), " "]);
      this.root.append(el("p", { className: "absent" }, "Not computed in this run: ", ...names));
    }
  }

  controls() {
    const known = Object.keys(AXES).filter((axis) => this.data.runs.some((run) => run.x[axis]));
    const mean = Math.max(1, ...this.data.runs.map((run) => run.mean_of || 1));
    return el("div", { className: "controls" },
      choice("over", known.map((axis) => [axis, AXES[axis]]), this.options.x, (axis) => {
        this.options.x = axis; this.range = null; this.redraw();
      }),
      choice("curves", [["true", "smoothed"], ["false", "as they are"]], this.options.smooth, (value) => {
        this.options.smooth = value === "true"; this.redraw();
      }),
      el("span", { className: "hint" }, "drag to zoom, double click to see all",
        mean > 1 ? `; each point is the mean of ${mean} steps` : ""));
  }

  card(chart) {
    const plot = el("div", { className: "plot" });
    const notes = this.data.warnings.filter((warning) => chart.keys.includes(warning.key));
    const made = el("article", { className: notes.length ? "card troubled" : "card" },
      el("h3", {}, chart.title), el("p", { className: "what" }, chart.what), plot,
      ...notes.map((note) => el("p", { className: note.until === null ? "note" : "note over" },
        el("strong", {}, note.title), ` ${stretch(note)}. ${note.text}`)));
    const card = { chart, plot, made, notes, u: null };
    this.cards.push(card);
    for (const observer of [this.seen, this.sized]) observer.observe(plot);
    return made;
  }

  onSeen(entries) {
    for (const { target, isIntersecting } of entries) {
      const card = this.cards.find((one) => one.plot === target);
      card.seen = isIntersecting;
      if (isIntersecting && (!card.u || card.stale)) this.draw(card);
    }
    this.onFirst?.();
    this.onFirst = null;
  }

  redraw() {
    for (const card of this.cards) {
      card.stale = true;
      if (card.seen) this.draw(card);
    }
  }

  /** The curves of a chart: of one run a curve for each number, of several one for each run. */
  series(chart) {
    const { runs, kind } = this.data;
    const axis = (run) => run.x[this.options.x] || run.x.step;
    const all = runs.flatMap((run, i) => chart.keys.filter((key) => run.metrics[key]).map((key, j) => ({
      label: kind === "compare" ? run.name : key, colour: colour(kind === "compare" ? i : j),
      x: axis(run), y: run.metrics[key],
    })));
    if (!this.options.smooth) return all;
    const pale = all.map((one) => ({ ...one, pale: true }));
    return [...pale, ...all.map((one) => ({ ...one, y: smoothed(one.y) }))];
  }

  draw(card) {
    const series = this.series(card.chart);
    const data = joined(series);
    if (card.u) card.u.destroy();
    card.stale = false;
    card.plot.replaceChildren();
    const width = card.plot.clientWidth || 380;
    card.u = new uPlot(this.uplotOptions(card, series, width), data, card.plot);
    if (this.range) card.u.setScale("x", this.range);
  }

  uplotOptions(card, series, width) {
    const line = { stroke: css("--faint"), width: 1 };
    const axis = { stroke: css("--muted"), grid: line, ticks: line, font: "11px system-ui, sans-serif" };
    const over = this.options.x;
    const at = over === "time" ? duration : short;
    return {
      width, height: 190, padding: [8, 20, 0, 0],
      cursor: { sync: { key: "rlhf", setSeries: false, filters: { pub: moves, sub: moves } }, drag: { x: true, y: false }, points: { size: 6 } },
      scales: { x: { time: false } },
      series: [
        { label: over, value: (u, x) => { const one = x ?? latest(u.data[0]); return over === "time" ? duration(one) : said(one); } },
        ...series.map((one) => ({
          label: one.label, class: one.pale ? "pale" : "line", stroke: one.pale ? `${one.colour}40` : one.colour,
          width: one.pale ? 1 : 1.6, spanGaps: true, points: { show: sparse(one.y), size: 5 },
          // Where the cursor is; without one, the latest.
          value: (u, y, i) => said(y ?? (u.cursor.idx === null ? latest(u.data[i]) : null)),
        })),
      ],
      axes: [
        { ...axis, size: 26, ...(over === "time" ? { incrs: ROUND_TIMES } : {}), values: (u, splits) => splits.map((x) => (x === null ? "" : at(x))) },
        { ...axis, size: (u, texts) => Math.max(58, ...(texts || []).map((text) => 16 + 7 * text.length)), values: (u, splits) => splits.map((y) => (y === null ? "" : short(y))) },
      ],
      hooks: {
        draw: [(u) => this.drawNotes(u, card.notes)],
        setScale: [(u, key) => this.onZoom(u, key)],
      },
    };
  }

  /** A line where trouble began. */
  drawNotes(u, notes) {
    const [run] = this.data.runs;
    for (const note of notes) {
      const index = run.x.step.findIndex((step) => step >= note.step);
      const x = index < 0 ? null : (run.x[this.options.x] || run.x.step)[index];
      if (x === null || x < u.scales.x.min || x > u.scales.x.max) continue;
      const left = Math.round(u.valToPos(x, "x", true));
      u.ctx.save();
      u.ctx.strokeStyle = css("--bad");
      u.ctx.setLineDash([4, 4]);
      u.ctx.beginPath();
      u.ctx.moveTo(left, u.bbox.top);
      u.ctx.lineTo(left, u.bbox.top + u.bbox.height);
      u.ctx.stroke();
      u.ctx.restore();
    }
  }

  /** Zoom every chart like the one that was zoomed. */
  onZoom(u, key) {
    if (key !== "x" || this.zooming || u.status !== 1) return;
    const { min, max } = u.scales.x, x = u.data[0];
    const whole = min <= x[0] && max >= x[x.length - 1];
    this.range = whole ? null : { min, max };
    this.zooming = true;
    for (const card of this.cards) {
      if (!card.u || card.u === u) continue;
      const own = card.u.data[0];
      card.u.setScale("x", this.range || { min: own[0], max: own[own.length - 1] });
    }
    this.zooming = false;
  }

  /** Show the curve of a warning. */
  show(key) {
    this.cards.find((one) => one.chart.keys.includes(key))?.made.scrollIntoView({ block: "center" });
  }
}

/** The last number of a curve. */
const latest = (y) => y.findLast((one) => one !== null && one !== undefined);

/** Cursors are shared; zooms go through onZoom, also to charts that are drawn later. */
const moves = (type) => type !== "mousedown" && type !== "mouseup" && type !== "dblclick";

const stretch = (note) => (note.until === null ? `since step ${note.step}` : `from step ${note.step} to ${note.until}`);

/** Whether a curve has so few points that lines alone would not show them. */
const sparse = (y) => y.reduce((count, one) => count + (one !== null), 0) <= 25;

/** Curves over one axis; those of runs with other steps get gaps. */
function joined(series) {
  if (!series.length) return [[0]];
  if (series.every((one) => one.x === series[0].x)) return [series[0].x, ...series.map((one) => one.y)];
  return uPlot.join(series.map((one) => [one.x, one.y]));
}
