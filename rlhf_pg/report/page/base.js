"use strict";
// Texts of models and users become text nodes, nothing else: no innerHTML anywhere.

const $ = (id) => document.getElementById(id);

/** Make an element with properties, and children that are elements or text. */
function el(tag, properties, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties || {})) {
    if (name === "dataset") Object.assign(made.dataset, value);
    else if (name.startsWith("aria-")) made.setAttribute(name, value);
    else made[name] = value;
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return made;
}

/** Say a number in about four digits. */
function said(x) {
  if (x === null || x === undefined || Number.isNaN(x)) return "–";
  const size = Math.abs(x);
  if (size === 0) return "0";
  if (size >= 1e6) return short(x);
  if (size < 1e-4) return x.toExponential(2);
  if (size >= 1000) return Math.round(x).toLocaleString("en-US");
  return String(Number(x.toPrecision(4)));
}

const signed = (x) => (x > 0 ? "+" : "") + said(x);

/** Say a large number with a letter for its thousands. */
function short(x) {
  const size = Math.abs(x);
  for (const [unit, letter] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (size >= unit) return `${Number((x / unit).toPrecision(5))}${letter}`;
  }
  return size > 0 && size < 1e-3 ? x.toExponential().replace(/(\.\d{2})\d*/, "$1") : String(Number(x.toPrecision(5)));
}

/** Say seconds as hours, minutes or seconds. */
function duration(seconds) {
  if (seconds < 60) return `${Number(seconds.toPrecision(2))}s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 60) return `${minutes}m`;
  return `${Math.floor(minutes / 60)}h${String(minutes % 60).padStart(2, "0")}`;
}

const isDark = () => matchMedia("(prefers-color-scheme: dark)").matches;

/** A row of buttons of which one is pressed. */
function choice(label, options, current, onChoose) {
  const buttons = options.map(([value, text, title]) =>
    el("button", { type: "button", title: title || "", dataset: { value } }, ...[text].flat()));
  const press = (value) => {
    for (const one of buttons) one.setAttribute("aria-pressed", String(one.dataset.value === String(value)));
  };
  for (const one of buttons) {
    one.addEventListener("click", () => { press(one.dataset.value); onChoose(one.dataset.value); });
  }
  press(current);
  const made = el("div", { className: "choice" }, el("span", { className: "label" }, label), ...buttons);
  made.setAttribute("role", "group");
  made.press = press;
  return made;
}

// --------------------------------------------------------------------------- packed steps

/** All bytes of an element with base64 in it. */
const bytesOf = (element) => Uint8Array.from(atob(element.textContent), (one) => one.charCodeAt(0));

/** The float16 with these 16 bits. */
function half(bits) {
  const sign = bits & 0x8000 ? -1 : 1, exponent = (bits >> 10) & 31, fraction = bits & 1023;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return exponent ? sign * (1 + fraction / 1024) * 2 ** (exponent - 15) : sign * fraction * 2 ** -24;
}

/** Read a packed step, laid out as rlhf_pg/report/token_steps.py says. */
async function unpacked(bytes) {
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const raw = new Uint8Array(await new Response(stream).arrayBuffer());
  const length = new DataView(raw.buffer).getUint32(0, true);
  const step = JSON.parse(new TextDecoder().decode(raw.subarray(4, 4 + length)));
  const count = step.tokens;
  let at = 4 + length;
  const take = (width) => {
    const made = new Uint32Array(count);
    for (let plane = 0; plane < width; plane++, at += count) {
      for (let i = 0; i < count; i++) made[i] += raw[at + i] * 2 ** (8 * plane);
    }
    return made;
  };
  step.numbers = {};
  if (step.vocabulary) {
    step.entries = take(4);
    step.action = take(1);
    for (const name of step.columns) step.numbers[name] = Float32Array.from(take(2), half);
  }
  let start = 0;
  for (const completion of step.completions) {
    completion.start = start;
    start += completion.length || 0;
  }
  return step;
}
