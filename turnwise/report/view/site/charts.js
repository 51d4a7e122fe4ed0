// Pictures of numbers: curves over steps, scores as dots, shares as bands.
"use strict";

const COLORS = [
  "var(--c1)",
  "var(--c2)",
  "var(--c3)",
  "var(--c4)",
  "var(--c5)",
  "var(--c6)",
  "var(--c7)",
  "var(--c8)",
];

function ticks(low, high, count = 5) {
  const span = high - low || 1;
  const rough = span / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const unit = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  const marks = [];
  for (let value = Math.ceil(low / unit) * unit; value <= high + unit * 1e-6; value += unit)
    marks.push(Number(value.toPrecision(12)));
  return marks;
}

function whole(marks) {
  return marks.filter(Number.isInteger);
}

// A chart of curves: [{ name, color, points: [[step, value]], dots, dashed }]. `marks` are [step, text, href].
// `onStep` hears the step that was clicked.
function curveChart(series, { marks = [], onStep, height = 230, label = "" } = {}) {
  const width = 860;
  const box = { left: 46, right: 12, top: 12, bottom: 26 };
  for (const one of series) one.name = plain(one.name);
  const all = series.flatMap((one) => one.points);
  if (!all.length) return el("p", { class: "empty" }, "No step has this metric.");
  const xs = all.map(([x]) => x);
  const ys = all.map(([, y]) => y);
  const x = [Math.min(...xs), Math.max(...xs)];
  if (x[0] === x[1]) {
    x[0] -= 0.5;
    x[1] += 0.5;
  }
  let y = [Math.min(...ys), Math.max(...ys)];
  if (y[0] >= 0 && y[1] <= 1 && y[1] > 0.2) y = [0, 1];
  else {
    const pad = (y[1] - y[0]) * 0.08 || 0.5;
    y = [y[0] - pad, y[1] + pad];
  }
  const toX = (step) => box.left + ((step - x[0]) / (x[1] - x[0])) * (width - box.left - box.right);
  const toY = (value) =>
    height - box.bottom - ((value - y[0]) / (y[1] - y[0])) * (height - box.top - box.bottom);
  const chart = svg("svg", {
    viewBox: `0 0 ${width} ${height}`,
    class: "chart",
    role: "img",
    "aria-label": label,
  });
  for (const mark of ticks(...y, 4)) {
    append(chart, [
      svg("line", { x1: box.left, x2: width - box.right, y1: toY(mark), y2: toY(mark), class: "grid" }),
      svg("text", { x: box.left - 7, y: toY(mark) + 4, class: "tick end" }, number(mark)),
    ]);
  }
  for (const mark of whole(ticks(...x, 8)))
    append(chart, [svg("text", { x: toX(mark), y: height - 8, class: "tick middle" }, number(mark))]);
  for (const [step, text] of marks) {
    const line = svg(
      "g",
      { class: "mark" },
      svg("line", { x1: toX(step), x2: toX(step), y1: box.top, y2: height - box.bottom }),
      svg("path", { d: `M${toX(step) - 5} ${box.top - 8}h10l-5 8z` }),
      svg("title", {}, plain(text)),
    );
    append(chart, [line]);
  }
  series.forEach((one) => append(chart, drawnSeries(one, toX, toY)));
  const cursor = svg("line", { class: "cursor", y1: box.top, y2: height - box.bottom, visibility: "hidden" });
  append(chart, [cursor]);
  const readout = el("div", { class: "readout" });
  const steps = [...new Set(xs)].sort((a, b) => a - b);
  const nearest = (event) => {
    const frame = chart.getBoundingClientRect();
    const at = ((event.clientX - frame.left) / frame.width) * width;
    return steps.reduce((best, step) => (Math.abs(toX(step) - at) < Math.abs(toX(best) - at) ? step : best));
  };
  chart.addEventListener("mousemove", (event) => {
    const step = nearest(event);
    cursor.setAttribute("x1", toX(step));
    cursor.setAttribute("x2", toX(step));
    cursor.setAttribute("visibility", "visible");
    const values = series
      .map((one) => [one, one.points.find(([at]) => at === step)])
      .filter(([, point]) => point);
    replaceChildren(
      readout,
      el("b", {}, `step ${step}`),
      values.map(([one, point]) => [
        el("span", { class: "swatch", style: { "--swatch": one.color } }),
        `${one.name} ${number(point[1])}`,
      ]),
    );
  });
  chart.addEventListener("mouseleave", () => {
    cursor.setAttribute("visibility", "hidden");
    replaceChildren(readout, legend(series));
  });
  if (onStep) {
    chart.classList.add("clickable");
    chart.addEventListener("click", (event) => onStep(nearest(event)));
  }
  replaceChildren(readout, legend(series));
  return el("figure", { class: "curve" }, chart, readout);
}

function legend(series) {
  return series.map((one) =>
    el(
      "span",
      { class: "entry" },
      el("span", { class: "swatch", style: { "--swatch": one.color } }),
      one.label || one.name,
    ),
  );
}

function drawnSeries(one, toX, toY) {
  const path = one.points
    .map(([step, value], place) => `${place ? "L" : "M"}${toX(step).toFixed(1)} ${toY(value).toFixed(1)}`)
    .join("");
  const parts = [
    svg("path", { d: path, class: one.isDashed ? "line dashed" : "line", style: { stroke: one.color } }),
  ];
  if (one.hasDots || one.points.length < 40) {
    for (const [step, value] of one.points)
      parts.push(
        svg("circle", {
          cx: toX(step),
          cy: toY(value),
          r: one.hasDots ? 3.4 : 2.2,
          style: { fill: one.color },
        }),
      );
  }
  return parts;
}

// Scores of siblings as dots on a line from the lowest to the highest score of the step.
function scoreDots(scores, low, high, { links = [], names = [], failed = [] } = {}) {
  const width = 168;
  const span = high - low || 1;
  const chart = svg("svg", {
    viewBox: `0 0 ${width} 22`,
    class: "dots",
    role: "img",
    "aria-label": `scores ${scores.map((score) => number(score)).join(", ")}`,
  });
  append(chart, [svg("line", { x1: 8, x2: width - 8, y1: 11, y2: 11, class: "axis" })]);
  const stacks = new Map();
  const places = scores.map((score) => {
    const x = 8 + ((score - low) / span) * (width - 16);
    const bin = Math.round(x / 7);
    const rank = stacks.get(bin) || 0;
    stacks.set(bin, rank + 1);
    return { x, bin, rank };
  });
  scores.forEach((score, index) => {
    const { x, bin, rank } = places[index];
    const count = stacks.get(bin);
    const room = Math.min(6, (width - 16) / Math.max(count * 2, 2));
    const side = x < width / 2 ? 1 : -1;
    const shift = count > 1 ? side * rank * room : 0;
    const dot = svg(
      "circle",
      { cx: x + shift, cy: 11, r: 4, class: `dot${failed[index] ? " failed" : ""}` },
      svg("title", {}, `${names[index] || `sibling ${index}`}: ${failed[index] ? "failed" : number(score)}`),
    );
    dot.style.setProperty("fill", failed[index] ? "var(--bad)" : scoreColor(score, low, high));
    append(chart, [links[index] ? svg("a", { href: links[index] }, dot) : dot]);
  });
  return chart;
}

function scoreColor(score, low, high) {
  const share = high > low ? (score - low) / (high - low) : 0.5;
  return `color-mix(in srgb, var(--good) ${Math.round(share * 100)}%, var(--score-low))`;
}

// Shares of each step as stacked bands: names, and for each step the values.
function shareChart(steps, names, valuesOf, unit) {
  const width = 860;
  const height = 210;
  const box = { left: 46, right: 12, top: 8, bottom: 26 };
  const totals = steps.map((_, place) => names.reduce((sum, name) => sum + (valuesOf(name, place) || 0), 0));
  const top = unit === "share" ? 1 : Math.max(...totals) || 1;
  const toY = (value) => height - box.bottom - (value / top) * (height - box.top - box.bottom);
  const each = (width - box.left - box.right) / steps.length;
  const chart = svg("svg", {
    viewBox: `0 0 ${width} ${height}`,
    class: "chart",
    role: "img",
    "aria-label": "shares of each step",
  });
  for (const mark of ticks(0, top, 4))
    append(chart, [
      svg("line", { x1: box.left, x2: width - box.right, y1: toY(mark), y2: toY(mark), class: "grid" }),
      svg(
        "text",
        { x: box.left - 7, y: toY(mark) + 4, class: "tick end" },
        unit === "share" ? `${Math.round(mark * 100)}%` : number(mark),
      ),
    ]);
  const readout = el("div", { class: "readout" });
  const series = names.map((name, place) => ({
    name,
    label: plain(name),
    color: COLORS[place % COLORS.length],
  }));
  steps.forEach((step, place) => {
    let from = 0;
    const column = svg("g", { class: "column" });
    series.forEach((one) => {
      const value = valuesOf(one.name, place) || 0;
      append(column, [
        svg("rect", {
          x: box.left + place * each,
          width: Math.max(each - (each > 6 ? 1 : 0), 0.5),
          y: toY(from + value),
          height: Math.max(toY(from) - toY(from + value), 0),
          style: { fill: one.color },
        }),
      ]);
      from += value;
    });
    column.addEventListener("mouseenter", () =>
      replaceChildren(
        readout,
        el("b", {}, `step ${step}`),
        series.map((one) => [
          el("span", { class: "swatch", style: { "--swatch": one.color } }),
          `${one.label} ${unit === "share" ? `${Math.round((valuesOf(one.name, place) || 0) * 100)}%` : seconds(valuesOf(one.name, place))}`,
        ]),
      ),
    );
    append(chart, [column]);
  });
  const marks = whole(ticks(steps[0], steps[steps.length - 1], 8));
  for (const mark of marks) {
    const place = steps.indexOf(mark);
    if (place >= 0)
      append(chart, [
        svg(
          "text",
          { x: box.left + (place + 0.5) * each, y: height - 8, class: "tick middle" },
          number(mark),
        ),
      ]);
  }
  chart.addEventListener("mouseleave", () => replaceChildren(readout, legend(series)));
  replaceChildren(readout, legend(series));
  return el("figure", { class: "curve" }, chart, readout);
}
