"use strict";
// What the pages share that show calls over time: words and numbers, bars, rows, tips, the theme.
// A call has kind, name, depth, number, children, start, end, first, prompt_tokens, cached, out, forced, text, error; and
// where they are known, phases (seconds by the names in PHASES), failures after which it was sent again, and of a recover
// the numbers of the dropped calls.
const at = id => document.getElementById(id);
const el = (tag, className, text) => {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
};
const seconds = value => value == null ? "…" : value >= 600 ? (value / 60).toFixed(1) + " min" : value >= 10 ? value.toFixed(1) + " s" : value >= 1 ? value.toFixed(2) + " s" : value >= 0.001 ? (1000 * value).toFixed(value >= 0.1 ? 0 : 1) + " ms" : (1e6 * value).toFixed(0) + " µs";
const count = value => value.toLocaleString("en");
const compact = value => value.toLocaleString("en", value < 10000 ? {} : { notation: "compact", maximumFractionDigits: 1 });
const costOf = (prompt, out, running) => prompt || !running ? `${compact(prompt)} → ${compact(out)}` : "…";
const percent = (part, whole) => whole ? Math.round(100 * part / whole) + "%" : "–";
const shorten = (text, most) => text.length > most ? text.slice(0, most - 1) + "…" : text;

function numbered(root) {
  const calls = [];
  (function number(call, depth) {
    call.number = calls.length;
    call.depth = depth;
    calls.push(call);
    call.children.forEach(child => number(child, depth + 1));
  })(root, 0);
  return calls;
}

const titleOf = call => ["fork", ""].includes(call.kind) ? call.name : `${call.kind} ${call.name}`.trim();

function shares(call) {
  return [
    ["cached", call.cached, "prompt tokens from the cache"],
    ["computed", call.prompt_tokens - call.cached, "prompt tokens computed"],
    ["generated", call.out - call.forced, "tokens generated"],
    ["forced", call.forced, "tokens forced by a grammar"],
  ];
}

function tilesOf(tiles) {
  return tiles.map(([value, name]) => {
    const tile = el("div", "tile");
    tile.append(el("b", "", value), el("span", "", name));
    return tile;
  });
}

// parts: [class, size, words]
function barOf(parts) {
  const bar = el("div", "bar"), whole = parts.reduce((sum, [, size]) => sum + size, 0);
  for (const [name, size] of parts) {
    if (!size) continue;
    const part = el("div", name);
    part.style.flex = 100 * size / whole + " 0 0";
    bar.append(part);
  }
  return bar;
}

function legendOf(parts, written = count) {
  const legend = el("div", "legend");
  for (const [name, size, words] of parts) {
    const entry = el("span");
    entry.append(el("i", name), `${written(size)} ${words}`);
    legend.append(entry);
  }
  return legend;
}

// The phases of a request in their order: [class, name, words].
const PHASES = [
  ["grammar", "grammar_s", "waiting for the grammar"],
  ["queue", "queue_s", "waiting in the queue"],
  ["computed", "prefill_s", "computing the prompt"],
  ["generated", "decode_s", "generating"],
];
const phasesOf = call => PHASES.map(([name, key, words]) => [name, call.phases?.[key] ?? 0, words]);

const niceStep = rough => { const power = 10 ** Math.floor(Math.log10(rough)); return [1, 2, 5, 10].map(n => n * power).find(n => n >= rough); };

// The places, from 0 to 1, of values from 0 to `end` on an axis along `spans`, which are pairs of values.
// Where long spans would squeeze the (lower) median one below `least` of the width, the spans in which nothing begins or
// ends are cut short. Spans [0, 1], [1, 2], [2, 100], [100, 101] with `least` 0.1 are placed as if from 2 to 100 passed 7.
function scaleOf(spans, end, least) {
  const sizes = spans.map(([from, to]) => to - from).filter(size => size > 0).sort((a, b) => a - b);
  const unit = sizes[(sizes.length - 1) >> 1] ?? end;
  const edges = [...new Set([0, end, ...spans.flat()])].filter(value => value >= 0 && value <= end).sort((a, b) => a - b);
  const gaps = edges.slice(1).map((value, index) => value - edges[index]);
  const total = most => gaps.reduce((sum, gap) => sum + Math.min(gap, most), 0);
  let most = end;
  while (most > 2 * unit && least * total(most) > unit) most = Math.max(2 * unit, most / 1.1);
  const whole = total(most), sums = [0];
  for (const gap of gaps) sums.push(sums.at(-1) + Math.min(gap, most));
  const place = value => {
    let index = edges.findIndex(edge => edge > value) - 1;
    if (index < 0) index = gaps.length - 1;
    return (sums[index] + (value - edges[index]) / gaps[index] * Math.min(gaps[index], most)) / whole;
  };
  const cut = gaps.flatMap((gap, index) => gap > most ? [[edges[index], edges[index + 1]]] : []);
  const narrow = innerWidth < 600, step = niceStep(whole / (narrow ? 2 : 5)), candidates = [];
  for (const [from, to] of [[0, 0], ...cut].map(([, to], index) => [to, cut[index]?.[0] ?? end])) {
    for (let value = Math.ceil(from / step - 1e-9) * step; value <= to; value += step) candidates.push(value);
  }
  const ticks = [];
  for (const value of [...candidates, ...cut.map(([, to]) => to)]) {
    if ((place(value) < 0.96 || value === end && cut.length) && ticks.every(tick => Math.abs(place(tick) - place(value)) > (narrow ? 0.22 : 0.09))) ticks.push(value);
  }
  return { place, ticks, breaks: cut.map(([from, to]) => (place(from) + place(to)) / 2) };
}

// CSS of an axis: lines at the ticks, and gaps where the scale is cut, which are drawn over what lies there.
function linesOf(scale) {
  const bands = (places, half, colour) => `linear-gradient(90deg, ${["transparent 0", ...places.flatMap(place =>
    [`transparent calc(${100 * place}% - ${half}px)`, `${colour} 0`, `${colour} calc(${100 * place}% + ${half}px)`, "transparent 0"])].join(", ")})`;
  const sorted = places => places.sort((a, b) => a - b);
  return { "--lines": bands(sorted(scale.ticks.filter(tick => tick).map(scale.place)), 0.5, "var(--line)"), "--breaks": [[2, "var(--panel)"], [3, "var(--faint)"]].map(([half, colour]) => bands(sorted(scale.breaks), half, colour)).join(", ") };
}

// Labels at the ends of an axis stay within it.
function standAt(label, place) {
  label.style.left = 100 * place + "%";
  label.style.transform = `translateX(-${place ? place > 0.96 ? 100 : 50 : 0}%)`;
}

function callRows(calls, last, choose) {
  for (const call of calls) for (const number of call.dropped ?? []) calls[number].gone = true;
  const scale = scaleOf(calls.filter(call => !call.children.length).map(call => [call.start, call.end ?? last]), last, 0.02);
  const axis = el("div", "axis num"), lane = el("div", "lane"), lines = linesOf(scale);
  for (const time of scale.ticks) {
    const mark = el("span", "", time ? seconds(time) : "0");
    standAt(mark, scale.place(time));
    lane.append(mark);
  }
  axis.append(el("div"), lane, el("div", "cost", "in → out"), el("div", "took", "time"));
  return [axis, ...calls.map(call => callRow(call, last, scale, lines, choose, calls))];
}

function callRow(call, last, scale, lines, choose, calls) {
  const group = call.kind === "program" || call.kind === "fork" || call.children.length > 0;
  const row = el("div", "row" + (group ? " group" : "") + (call.error ? " failed" : call.end == null ? " live" : "") + (call.gone ? " gone" : ""));
  row.id = "row" + call.number;
  if (call.fresh != null) row.style.setProperty("--fresh", call.fresh + "%");
  const label = el("div", "label");
  label.style.paddingLeft = 14 + 16 * call.depth + "px";
  label.append(el("span", "name", call.name || "unnamed"));
  const kind = ["program", "fork"].includes(call.kind) ? "" : call.kind;
  for (const [name, text] of [["kind", kind], ["client", call.client], ["excerpt", call.excerpt]]) {
    if (text) label.append(el("span", name, text));
  }
  const lane = el("div", "lane");
  for (const [name, value] of Object.entries(lines)) lane.style.setProperty(name, value);
  const mark = el("div", ["tool", "recover"].includes(call.kind) ? call.kind : group ? "frame" : "work");
  // A recover is drawn from the first call that it dropped.
  const start = Math.min(call.start, ...(call.dropped ?? []).map(number => calls[number].start)), end = call.end ?? last;
  mark.style.left = 100 * scale.place(start) + "%";
  mark.style.width = 100 * Math.max(scale.place(end) - scale.place(start), 0) + "%";
  if (mark.className === "work") fillWork(mark, call, last, scale.place);
  lane.append(mark);
  const other = ["tool", "recover"].includes(call.kind), cost = other ? "" : costOf(call.prompt_tokens, call.out, call.end == null);
  row.append(label, lane, el("div", "cost num", cost), el("div", "took num", call.kind === "recover" ? "" : seconds(end - call.start)));
  row.addEventListener("click", () => choose(call.number));
  hovering(row, () => summary(call));
  return row;
}

// The time of a call as [class, from, to], in order: attempts that failed and the pauses after them, what is outside of the
// engine, the phases. Without phases the time goes to the prompt until the first text, then to the output. The time of the
// prompt and of the output is divided by their tokens.
function segments(call, last) {
  const end = call.end ?? last, found = [];
  let now = call.start;
  const until = (name, time) => { if (time > now) found.push([name, now, now = time]); };
  for (const failure of call.failures ?? []) {
    until("failure", failure.end_s);
    until("pause", failure.again_s);
  }
  let first = Math.min(Math.max(call.first ?? end, now), end);
  if (call.phases) {
    const phases = phasesOf(call).map(part => part[1]), sum = phases.reduce((sum, time) => sum + time, 0);
    const [grammar, queue, prefill] = phases.map(time => time * Math.min(1, (end - now) / sum));
    until("outside", end - sum);
    until("grammar", now + grammar);
    until("queue", now + queue);
    first = now + prefill;
  }
  const [cached, computed, generated, forced] = shares(call);
  for (const [from, to, parts] of [[now, first, [cached, computed]], [first, end, [generated, forced]]]) {
    const tokens = parts[0][1] + parts[1][1];
    for (const [name, part] of tokens ? parts : [["pending", 1]]) until(name, now + (to - from) * part / (tokens || 1));
  }
  return found;
}

function fillWork(mark, call, last, place) {
  const whole = Math.max(place(call.end ?? last) - place(call.start), 1e-9);
  for (const [name, from, to] of segments(call, last)) {
    const piece = el("div", name);
    piece.style.width = 100 * (place(to) - place(from)) / whole + "%";
    mark.append(piece);
  }
}

function summary(call) {
  const box = el("div");
  box.append(el("b", "", titleOf(call)));
  for (const part of shares(call)) {
    if (part[1]) box.append(legendOf([part]));
  }
  for (const part of phasesOf(call)) {
    if (part[1] >= 0.0005) box.append(legendOf([part], seconds));
  }
  if (call.failures?.length) box.append(el("div", "", `sent again ${count(call.failures.length)}x: ${shorten(call.failures.at(-1).error, 160)}`));
  if (call.text) box.append(el("div", "mono said", shorten(call.text, 160)));
  if (call.miss) box.append(el("div", "sub", shorten(`${count(call.miss.computed_tokens)} computed: ${call.miss.text}`, 240)));
  if (call.error) box.append(el("div", "", call.error));
  return box;
}

function hovering(element, content) {
  element.addEventListener("mousemove", event => tip(event.clientX, event.clientY, content(event)));
  element.addEventListener("mouseleave", hideTip);
}

function tip(x, y, content) {
  const box = at("tip");
  box.replaceChildren(content);
  box.style.display = "block";
  const { width, height } = box.getBoundingClientRect();
  box.style.left = Math.max(8, Math.min(x + 14, innerWidth - width - 8)) + "px";
  box.style.top = (y + 18 + height > innerHeight ? Math.max(8, y - height - 10) : y + 18) + "px";
}
function hideTip() { at("tip").style.display = "none"; }

// What the page's address asks for after "#", such as call=3&theme=dark.
const asked = new URLSearchParams(location.hash.slice(1));

function setTheme(name) {
  document.documentElement.dataset.theme = name;
  at("theme").textContent = name === "dark" ? "Light" : "Dark";
}
function startTheme() {
  setTheme(asked.get("theme") ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"));
  at("theme").addEventListener("click", () => setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
}
