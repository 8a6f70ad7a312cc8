// The token view: every completion of a logged step, its tokens coloured by one of their numbers.

const BINS = 12; // shades of each sign
const tint = (sign, shade) => `rgba(var(--${sign}), ${0.06 + 0.05 * shade})`;

class Tokens {
  /** `load(step)` gives a packed step; `columns` say what the numbers of tokens are. */
  constructor(data, load) {
    Object.assign(this, { data, load, at: 0, prompt: 0, column: data.columns[0].name, marked: null });
    this.cache = new Map();
    this.tip = el("div", { className: "tip", hidden: true });
    this.list = el("nav", { className: "prompts", "aria-label": "prompts of the step" });
    this.view = el("div", { className: "mates" });
    this.head = el("div", { className: "head" });
    this.note = el("p", { className: "hint" });
    this.root = el("section", { className: "tokens" });
    this.root.addEventListener("mouseover", (event) => this.point(event));
    this.root.addEventListener("mousemove", (event) => this.placeTip(event));
    this.root.addEventListener("mouseleave", () => { this.tip.hidden = true; });
    this.build();
  }

  build() {
    const { steps, left_out } = this.data;
    this.slider = el("input", { type: "range", min: 0, max: Math.max(0, steps.length - 1), value: this.at, "aria-label": "logged step" });
    this.slider.addEventListener("input", () => this.go(Number(this.slider.value)));
    this.said = el("output", { className: "step" });
    const jump = (name, text) => el("button", { type: "button", title: text, onclick: () => this.jump(name) }, name);
    this.colours = choice("colour", this.data.columns.map((column, i) =>
      [column.name, [column.label, el("kbd", {}, column.key || String(i + 1))], column.what]), this.column, (name) => this.paintBy(name));
    this.legend = el("div", { className: "legend" });
    this.root.replaceChildren(
      el("div", { className: "controls" },
        el("div", { className: "stepper" }, el("span", { className: "label" }, "step"),
          el("button", { type: "button", title: "step before (←)", onclick: () => this.go(this.at - 1) }, "←"),
          this.slider,
          el("button", { type: "button", title: "step after (→)", onclick: () => this.go(this.at + 1) }, "→"), this.said),
        el("div", { className: "choice" }, el("span", { className: "label" }, "go to"),
          jump("first", "first logged step"), jump("best", "completion with the highest total score"),
          jump("worst", "completion with the lowest total score"), jump("latest", "latest logged step"))),
      el("div", { className: "controls" }, this.colours, this.legend),
      left_out ? el("p", { className: "hint" }, left_out) : "", this.note,
      el("div", { className: "split" }, this.list, el("div", { className: "group-view" }, this.head, this.view)),
      this.tip);
  }

  /** Show a step by its place among the logged ones. */
  async go(at, prompt = 0, marked = null) {
    const { steps } = this.data;
    if (!steps.length) return;
    this.at = Math.min(Math.max(0, at), steps.length - 1);
    this.slider.value = this.at;
    const { step } = steps[this.at];
    this.said.textContent = `${step} (${this.at + 1} of ${steps.length})`;
    const asked = (this.asked = Symbol("asked"));
    let loaded;
    try {
      loaded = await this.loaded(step);
    } catch (error) {
      this.note.textContent = `The tokens of step ${step} cannot be read: ${error.message}`;
      return;
    }
    if (asked !== this.asked) return; // the reader has gone on
    this.step = loaded;
    this.marked = marked;
    this.ranges = {};
    this.note.textContent = "";
    if (typeof prompt === "object") prompt = loaded.prompts.findIndex((one) => one.index === prompt.index);
    this.available();
    this.showList();
    this.showPrompt(Math.max(0, prompt));
  }

  async loaded(step) {
    if (!this.cache.has(step)) {
      if (this.cache.size >= 8) this.cache.delete(this.cache.keys().next().value);
      this.cache.set(step, this.load(step).then(unpacked));
      this.cache.get(step).catch(() => this.cache.delete(step));
    }
    return this.cache.get(step);
  }

  jump(name) {
    const { steps } = this.data;
    if (name === "first") return this.go(0);
    if (name === "latest") return this.go(steps.length - 1);
    let found = -1;
    steps.forEach((one, i) => {
      if (!one[name]) return;
      const better = found < 0 || (name === "best" ? one.best[0] > steps[found].best[0] : one.worst[0] < steps[found].worst[0]);
      if (better) found = i;
    });
    if (found < 0) { this.note.textContent = "No completion has a score."; return undefined; }
    const [, index, sample] = steps[found][name];
    return this.go(found, { index }, sample);
  }

  /** Grey out the numbers that this step does not have; leave one that it has. */
  available() {
    const { columns } = this.step;
    for (const button of this.colours.querySelectorAll("button")) button.disabled = !columns.includes(button.dataset.value);
    if (columns.length && !columns.includes(this.column)) this.column = columns[0];
    this.colours.press(this.column);
  }

  showList() {
    const { prompts, completions } = this.step;
    this.list.replaceChildren(...prompts.map((prompt, i) => {
      const own = completions.filter((one) => one.prompt === i);
      const totals = own.map((one) => one.total).filter((x) => x !== null);
      const mean = totals.length ? totals.reduce((a, b) => a + b, 0) / totals.length : null;
      const last = prompt.turns.length ? prompt.turns[prompt.turns.length - 1][1] : "";
      const one = el("button", { type: "button", onclick: () => this.showPrompt(i) },
        el("span", { className: "line" }, el("b", {}, nameOf(prompt, i)),
          el("span", { className: "mean" }, mean === null ? "" : `⌀ ${said(mean)}`)),
        el("span", { className: "text" }, last.slice(0, 120) || "–"));
      return one;
    }));
  }

  /** Show the completions of one prompt side by side. */
  showPrompt(i) {
    const { prompts, completions } = this.step;
    this.prompt = Math.min(Math.max(0, i), Math.max(0, prompts.length - 1));
    [...this.list.children].forEach((one, j) => one.setAttribute("aria-current", String(j === this.prompt)));
    this.list.children[this.prompt]?.scrollIntoView({ block: "nearest" });
    const prompt = prompts[this.prompt];
    this.head.replaceChildren(prompt && prompt.turns.length ? turnsOf(prompt.turns, "prompt") : "");
    const mates = completions.filter((one) => one.prompt === this.prompt);
    this.view.replaceChildren(...mates.map((one) => this.mate(one)));
    if (!mates.length) this.view.append(el("p", { className: "empty" }, "This step has no completions."));
    this.paint();
    this.view.querySelector(".marked")?.scrollIntoView({ block: "nearest", inline: "center" });
  }

  mate(completion) {
    const body = completion.turns ? turnsOf(completion.turns, "completion") : this.spans(completion);
    const facts = [
      ...completion.scores.map(([name, score]) => [name, said(score)]),
      ["advantage", completion.advantage === null ? null : signed(completion.advantage)],
      ["tokens", completion.length === null ? null : completion.length.toLocaleString("en-US")],
      ...completion.extra,
    ].filter(([, value]) => value !== null);
    const isMarked = this.marked !== null && completion.sample === this.marked;
    return el("article", { className: isMarked ? "mate marked" : "mate" },
      el("header", {}, el("b", {}, `sample ${completion.sample}`),
        completion.truncated ? el("span", { className: "badge" }, "truncated") : null,
        completion.error ? el("span", { className: "badge", title: completion.error }, "error") : null,
        el("span", { className: "total", title: "weighted sum of the scores" }, said(completion.total))),
      el("dl", {}, ...facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)))),
      completion.error ? el("p", { className: "error" }, completion.error) : null,
      body);
  }

  spans(completion) {
    const { entries, vocabulary } = this.step;
    const text = el("div", { className: "text" });
    for (let t = completion.start; t < completion.start + completion.length; t++) {
      const one = document.createElement("span");
      one.textContent = vocabulary.texts[entries[t]].replaceAll("\n", "↵\n");
      one.token = t;
      text.append(one);
    }
    if (!completion.length) text.append(el("i", {}, "no tokens"));
    return text;
  }

  // ------------------------------------------------------------------------------- colours

  paintBy(name) {
    if (!this.step || !this.step.columns.includes(name)) return;
    this.column = name;
    this.colours.press(name);
    this.paint();
  }

  describe(name) { return this.data.columns.find((one) => one.name === name) || { label: name, diverging: true }; }

  /** The number of a colour's full strength: that of all but two of a hundred tokens of the step. */
  range(name) {
    if (this.ranges[name] === undefined) {
      const numbers = this.step.numbers[name].filter((x) => Number.isFinite(x)).map(Math.abs).sort();
      this.ranges[name] = numbers.length ? numbers[Math.min(numbers.length - 1, Math.floor(numbers.length * 0.98))] || numbers[numbers.length - 1] : 0;
    }
    return this.ranges[name];
  }

  paint() {
    const { columns, numbers } = this.step;
    if (!columns.length) {
      this.legend.replaceChildren(el("span", { className: "hint" }, "The run kept no numbers of these tokens: texts only."));
      return;
    }
    const { diverging } = this.describe(this.column);
    const own = numbers[this.column], most = this.range(this.column);
    for (const one of this.view.querySelectorAll(".text > span")) {
      const x = own[one.token];
      const shade = most > 0 && Number.isFinite(x) ? Math.min(BINS, Math.round((Math.abs(x) / most) * BINS)) : 0;
      const sign = !diverging ? "size" : x > 0 ? "positive" : "negative";
      one.className = this.step.action[one.token] ? "" : "given";
      one.style.backgroundColor = shade ? tint(sign, shade) : "";
    }
    this.showLegend(diverging, most);
  }

  showLegend(diverging, most) {
    const shades = [];
    const swatch = (sign, shade) => {
      const one = el("i");
      if (shade) one.style.backgroundColor = tint(sign, shade);
      shades.push(one);
    };
    if (diverging) for (let i = BINS; i > 0; i -= 2) swatch("negative", i);
    for (let i = 0; i <= BINS; i += 2) swatch(diverging ? "positive" : "size", i);
    const isNegative = !diverging && this.step.numbers[this.column].some((x) => x < 0);
    const edge = said(most), column = this.describe(this.column);
    this.legend.replaceChildren(
      el("span", {}, diverging ? `−${edge}` : "0"), el("span", { className: "swatches" }, ...shades),
      el("span", {}, diverging ? `+${edge}` : (isNegative ? "−" : "") + edge),
      el("span", { className: "hint" }, most > 0 ? column.what || column.label : `${column.label}: 0 for every token of this step`));
  }

  // ------------------------------------------------------------------------------- pointing

  point(event) {
    const t = event.target.token;
    if (t === undefined) { this.tip.hidden = true; return; }
    const { vocabulary, entries, action, columns, numbers } = this.step;
    const entry = entries[t];
    const rows = columns.map((name) => {
      const column = this.describe(name);
      return el("div", { className: name === this.column ? "current" : "" }, el("dt", {}, column.label), el("dd", {}, said(numbers[name][t])));
    });
    this.tip.replaceChildren(
      el("div", { className: "what" }, el("code", {}, vocabulary.texts[entry] ? `“${vocabulary.texts[entry].replaceAll("\n", "↵")}”` : "(part of a character)"),
        el("span", {}, `id ${vocabulary.ids[entry]}`)),
      el("dl", {}, ...rows), action[t] ? "" : el("p", {}, "not chosen by the policy"));
    this.tip.hidden = false;
    this.placeTip(event);
  }

  placeTip(event) {
    if (this.tip.hidden) return;
    const { offsetWidth: width, offsetHeight: height } = this.tip;
    this.tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - width - 8))}px`;
    this.tip.style.top = `${event.clientY + 18 + height > innerHeight ? Math.max(4, event.clientY - height - 10) : event.clientY + 18}px`;
  }

  // ----------------------------------------------------------------------------------- keys

  /** Act on a key; return whether it meant something here. */
  key(key) {
    const columns = this.data.columns;
    const column = columns.find((one, i) => one.key === key || key === String(i + 1));
    if (column) this.paintBy(column.name);
    else if (key === "ArrowLeft") this.go(this.at - 1, this.prompt);
    else if (key === "ArrowRight") this.go(this.at + 1, this.prompt);
    else if (!this.step) return false;
    else if (key === "ArrowUp") this.showPrompt(this.prompt - 1);
    else if (key === "ArrowDown") this.showPrompt(this.prompt + 1);
    else return false;
    return true;
  }
}

const nameOf = (prompt, i) => `prompt ${prompt.index === null ? i + 1 : prompt.index}`;

/** The messages of a chat with their roles; a plain text without one. */
function turnsOf(turns, className) {
  return el("div", { className: `turns ${className}` }, ...turns.map(([role, text]) =>
    el("div", { className: "turn" }, role ? el("span", { className: "role" }, role) : null, el("div", { className: "text" }, text))));
}
