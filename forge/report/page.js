"use strict";
// Draws each chart as SVG. Names and labels go in as text, never as markup.
const data = JSON.parse(document.getElementById("data").textContent);
const WIDTH = 560, HEIGHT = 250, LEFT = 56, RIGHT = 10, TOP = 10, BOTTOM = 24;
const hiddenRuns = new Set();
let smoothing = 0;

function add(parent, name, attributes = {}, text = "") {
  const svg = parent instanceof SVGElement || name === "svg";
  const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.textContent = text;
  return parent.appendChild(made);
}

function shown(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  return size >= 1e6 || size < 1e-3 ? value.toExponential(2).replace(/\.?0+e/, "e").replace("e+", "e") : String(+value.toPrecision(size >= 1e4 ? 6 : 4));
}

// The exponential mean, corrected for its start at zero.
function smoothed(values) {
  if (!smoothing) return values;
  let sum = 0, weight = 0;
  return values.map((value) => {
    sum = smoothing * sum + (1 - smoothing) * value;
    weight = smoothing * weight + (1 - smoothing);
    return sum / weight;
  });
}

function ticks(low, high, log) {
  if (log && high / low >= 10) {
    const found = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++)
      for (const digit of high / low > 1e3 ? [1] : [1, 2, 5]) found.push(digit * 10 ** power);
    const inside = found.filter((tick) => tick >= low && tick <= high);
    return inside.filter((_, at) => at % Math.ceil(inside.length / 8) === 0);
  }
  const rough = (high - low) / 5, unit = 10 ** Math.floor(Math.log10(rough));
  const step = unit * [1, 2, 5, 10].find((factor) => factor * unit >= rough * 0.999);
  const found = [];
  for (let at = Math.ceil(low / step); at <= Math.floor(high / step + 1e-9); at++) found.push(+(at * step).toPrecision(12));
  return found;
}

function nearest(steps, step) {
  let low = 0, high = steps.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (steps[middle] < step) low = middle + 1; else high = middle;
  }
  return low > 0 && step - steps[low - 1] < steps[low] - step ? low - 1 : low;
}

// A linear map of [from, to] onto [start, end]; a single value goes to the middle.
function scale(from, to, start, end) {
  return (value) => (to > from ? start + ((value - from) / (to - from)) * (end - start) : (start + end) / 2);
}

function range(lists) {
  let low = Infinity, high = -Infinity;
  for (const list of lists) for (const value of list) { low = Math.min(low, value); high = Math.max(high, value); }
  return [low, high];
}

function build(figure) {
  const curves = data.charts[figure.dataset.chart];
  const title = figure.querySelector("h3").textContent, plot = figure.querySelector(".plot");
  const split = curves.some((curve) => curve.label), hidden = new Set();
  let log = false, places = null, cursor = null;
  const name = (curve) => [data.runs.length > 1 || !split ? data.runs[curve.run] : "", curve.label].filter(Boolean).join(" ");
  const color = (curve) => `c${(split ? curves.indexOf(curve) : curve.run) % 8}`;

  const logButton = add(figure.querySelector("figcaption"), "button", {type: "button", "aria-pressed": "false"}, "log scale");
  const svg = add(plot, "svg", {viewBox: `0 0 ${WIDTH} ${HEIGHT}`, tabindex: "0", role: "img"});
  const readout = add(plot, "p", {class: "readout", "aria-live": "polite"});
  const legend = add(plot, "div", {class: "legend"});

  function visible() {
    const found = curves.filter((curve) => !hiddenRuns.has(curve.run) && !hidden.has(curve));
    return found.map((curve) => {
      const kept = curve.values.map((value, at) => at).filter((at) => !log || curve.values[at] > 0);
      const raw = kept.map((at) => curve.values[at]);
      return {curve, steps: kept.map((at) => curve.steps[at]), raw, values: smoothed(raw)};
    }).filter((line) => line.steps.length);
  }

  function axes([x0, x1], [y0, y1], x, y) {
    const grid = add(svg, "g");
    for (const tick of y1 > y0 ? ticks(y0, y1, log) : [y0]) {
      add(grid, "line", {class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y(tick), y2: y(tick)});
      add(grid, "text", {x: LEFT - 6, y: y(tick) + 4, "text-anchor": "end"}, shown(tick));
    }
    for (const tick of x1 > x0 ? ticks(x0, x1, false) : [x0])
      add(grid, "text", {x: x(tick), y: HEIGHT - 6, "text-anchor": "middle"}, shown(tick));
  }

  function draw() {
    svg.replaceChildren();
    const lines = visible();
    svg.setAttribute("aria-label", `${title}: ` + (lines.map(({curve, raw}) =>
      `${name(curve)} from ${shown(raw[0])} to ${shown(raw[raw.length - 1])}`).join("; ") || "nothing to show"));
    places = null;
    if (!lines.length) { add(svg, "text", {x: WIDTH / 2, y: HEIGHT / 2, "text-anchor": "middle"}, "nothing to show"); show(); return; }
    const xs = range(lines.map((line) => line.steps)), ys = range(lines.map((line) => line.raw));
    const along = log ? Math.log : Number;
    const x = scale(...xs, LEFT + 4, WIDTH - RIGHT - 4), height = scale(along(ys[0]), along(ys[1]), HEIGHT - BOTTOM - 4, TOP);
    const y = (value) => height(along(value));
    axes(xs, ys, x, y);
    const path = (steps, values) => steps.map((step, at) => `${+x(step).toFixed(1)},${+y(values[at]).toFixed(1)}`).join(" ");
    for (const {curve, steps, raw, values} of lines) {
      const group = add(svg, "g", {class: color(curve)});
      if (smoothing) add(group, "polyline", {class: "curve raw", points: path(steps, raw)});
      add(group, "polyline", {class: "curve", points: path(steps, values), "data-run": data.runs[curve.run], "data-label": curve.label, "data-points": steps.length});
      if (steps.length === 1) add(group, "circle", {class: "dot", r: 3, cx: x(steps[0]), cy: y(values[0])});
    }
    places = {lines, xs, x, y, marks: add(svg, "g")};
    show();
  }

  // The vertical line at the cursor's step, and the values there.
  function show() {
    readout.replaceChildren();
    if (!places || cursor === null) return;
    const {lines, xs, x, y, marks} = places, step = Math.min(Math.max(cursor, xs[0]), xs[1]);
    marks.replaceChildren();
    add(marks, "line", {class: "cursor", x1: x(step), x2: x(step), y1: TOP, y2: HEIGHT - BOTTOM});
    add(readout, "b", {}, `step ${step}`);
    for (const {curve, steps, raw, values} of lines) {
      const at = nearest(steps, step), exact = smoothing ? ` (${shown(raw[at])})` : "";
      add(add(marks, "g", {class: color(curve)}), "circle", {class: "dot", r: 3, cx: x(steps[at]), cy: y(values[at])});
      readout.append(" · ");
      add(readout, "span", {class: color(curve)}, `${name(curve)} ${shown(values[at])}${exact}`);
    }
  }

  svg.addEventListener("pointermove", (event) => {
    if (!places) return;
    const box = svg.getBoundingClientRect(), [x0, x1] = places.xs;
    const wanted = scale(LEFT + 4, WIDTH - RIGHT - 4, x0, x1)(((event.clientX - box.left) / box.width) * WIDTH);
    const steps = places.lines[0].steps;
    cursor = steps[nearest(steps, wanted)];
    show();
  });
  svg.addEventListener("pointerleave", () => { cursor = null; if (places) places.marks.replaceChildren(); show(); });
  svg.addEventListener("keydown", (event) => {
    const move = {ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity}[event.key];
    if (!move || !places) return;
    event.preventDefault();
    const steps = places.lines[0].steps, at = cursor === null ? (move < 0 ? steps.length : -1) : nearest(steps, cursor);
    cursor = steps[Math.min(Math.max(at + move, 0), steps.length - 1)];
    show();
  });
  logButton.addEventListener("click", () => {
    log = !log;
    logButton.setAttribute("aria-pressed", log);
    draw();
  });
  for (const curve of split ? curves : []) {  // runs have their switches above
    const button = add(legend, "button", {type: "button", "aria-pressed": "true", class: color(curve)});
    add(button, "span", {class: "swatch"});
    add(button, "span", {}, name(curve));
    button.addEventListener("click", () => {
      if (!hidden.delete(curve)) hidden.add(curve);
      button.setAttribute("aria-pressed", !hidden.has(curve));
      draw();
    });
  }
  draw();
  return draw;
}

const redraws = [...document.querySelectorAll("figure[data-chart]")].map(build);
const redraw = () => redraws.forEach((draw) => draw());
for (const box of document.querySelectorAll("input[data-run]"))
  box.addEventListener("change", () => {
    if (box.checked) hiddenRuns.delete(+box.dataset.run); else hiddenRuns.add(+box.dataset.run);
    redraw();
  });
const slider = document.getElementById("smoothing");
slider.addEventListener("input", () => {
  smoothing = +slider.value;
  document.querySelector("output").textContent = slider.value;
  redraw();
});
document.documentElement.dataset.drawn = redraws.length;
