// The page of time: what each step spent its time with, and the spans of a profiled run.
"use strict";

turnwise.pages.timeline = async (parts) => {
  const run = parts[0];
  const { about, name } = turnwise.runs[run];
  const metrics = about.metrics || { step: [], values: {} };
  const panels = [
    sharePanel("What the trainer did", metrics, "time/trainer/"),
    sharePanel("What the rollouts did", metrics, "time/rollouts/"),
    phasePanel(metrics),
  ].filter(Boolean);
  if (turnwise.runs[run].has_timeline) panels.push(await spansPanel(run));
  else
    panels.push(el("p", { class: "muted" }, "Spans of single calls: turnwise train --profile records them."));
  return el(
    "section",
    {},
    el("h1", {}, "Time of ", shown(name)),
    panels.length > 1 ? null : el("p", { class: "empty" }, "metrics.jsonl has no shares of time."),
    panels,
  );
};

function stepRows(metrics, names) {
  const places = [];
  // The row of the final validation has no rollouts of its own.
  const played = metrics.values["time/step_rollout"];
  metrics.step.forEach((_, place) => {
    const isStep = !played || isKnown(played[place]);
    if (isStep && names.some((name) => isKnown(metrics.values[name][place]))) places.push(place);
  });
  return places;
}

function sharePanel(title, metrics, prefix) {
  const names = Object.keys(metrics.values).filter((name) => name.startsWith(prefix));
  if (!names.length) return null;
  const places = stepRows(metrics, names);
  const shares = names.map((name) => name.slice(prefix.length));
  return el(
    "div",
    { class: "panel" },
    el("h2", {}, title),
    shareChart(
      places.map((place) => metrics.step[place] + 1),
      shares,
      (name, at_) => metrics.values[prefix + name][places[at_]],
      "share",
    ),
  );
}

const WHOLE = ["time/step_total", "time/step_wall"];

function phasePanel(metrics) {
  const names = Object.keys(metrics.values).filter(
    (name) => name.startsWith("time/step_") && !WHOLE.includes(name),
  );
  if (!names.length) return null;
  const places = stepRows(metrics, names);
  const total = (name) => places.reduce((sum, place) => sum + (metrics.values[name][place] || 0), 0);
  const long = names
    .map((name) => [name, total(name)])
    .sort((a, b) => b[1] - a[1])
    .slice(0, 8)
    .filter(([, sum]) => sum > 0)
    .map(([name]) => name);
  if (!long.length) return null;
  return el(
    "div",
    { class: "panel" },
    el("h2", {}, "Seconds of each phase"),
    shareChart(
      places.map((place) => metrics.step[place] + 1),
      long.map((name) => name.slice(10)),
      (name, at_) => metrics.values[`time/step_${name}`][places[at_]],
      "seconds",
    ),
  );
}

async function spansPanel(run) {
  const cache = turnwise.caches.timelines;
  if (!cache.has(run)) await loadScript(`${run}-timeline.js`);
  const data = cache.get(run);
  const end = Math.max(
    ...data.tracks.map((track) =>
      track.spans.length
        ? track.spans[track.spans.length - 1][1] + track.spans[track.spans.length - 1][2]
        : 0,
    ),
    1e-3,
  );
  const canvas = el("canvas", { class: "spans", tabindex: "0", "aria-label": "spans" });
  const readout = el("div", { class: "readout" }, "Wheel zooms, drag moves, a double click shows all.");
  const state = { from: 0, to: end, data, canvas, row: 20, left: 150 };
  canvas.height = data.tracks.length * state.row + 22;
  const draw = () => drawSpans(state);
  canvas.addEventListener(
    "wheel",
    (event) => {
      event.preventDefault();
      const at_ = timeAt(state, event);
      const factor = event.deltaY > 0 ? 1.25 : 0.8;
      state.from = Math.max(0, at_ - (at_ - state.from) * factor);
      state.to = Math.min(end, at_ + (state.to - at_) * factor);
      draw();
    },
    { passive: false },
  );
  let drag = null;
  canvas.addEventListener("mousedown", (event) => {
    drag = { x: event.clientX, from: state.from, to: state.to };
  });
  canvas.addEventListener("mouseup", () => {
    drag = null;
  });
  canvas.addEventListener("mouseleave", () => {
    drag = null;
  });
  canvas.addEventListener("dblclick", () => {
    state.from = 0;
    state.to = end;
    draw();
  });
  canvas.addEventListener("mousemove", (event) => {
    if (drag) {
      const shift = ((drag.x - event.clientX) / (canvas.clientWidth - state.left)) * (drag.to - drag.from);
      const room = Math.min(Math.max(shift, -drag.from), end - drag.to);
      state.from = drag.from + room;
      state.to = drag.to + room;
      draw();
      return;
    }
    const span = spanAt(state, event);
    readout.textContent = span
      ? `${plain(data.names[span[0]])}: ${seconds(span[2])}, from ${seconds(span[1])} on`
      : "Wheel zooms, drag moves, a double click shows all.";
  });
  requestAnimationFrame(draw);
  window.addEventListener("resize", draw);
  return el(
    "div",
    { class: "panel" },
    el("h2", {}, "Spans"),
    data.left_out
      ? el("p", { class: "muted small" }, `the ${number(data.left_out)} shortest are left out`)
      : null,
    canvas,
    readout,
  );
}

function timeAt(state, event) {
  const x = event.offsetX - state.left;
  return state.from + (x / (state.canvas.clientWidth - state.left)) * (state.to - state.from);
}

function spanAt(state, event) {
  const track = state.data.tracks[Math.floor(event.offsetY / state.row)];
  const time = timeAt(state, event);
  return track && track.spans.find(([, start, length]) => start <= time && time <= start + length);
}

function drawSpans(state) {
  const { canvas, data } = state;
  if (!canvas.isConnected) return;
  const style = getComputedStyle(document.documentElement);
  const color = (name) => style.getPropertyValue(name).trim();
  const width = canvas.clientWidth;
  const ratio = window.devicePixelRatio || 1;
  const height = data.tracks.length * state.row + 22;
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  context.font = "11px system-ui, sans-serif";
  const scale = (width - state.left) / (state.to - state.from);
  data.tracks.forEach((track, row) => {
    const y = row * state.row;
    context.fillStyle = color("--muted");
    context.fillText(short(plain(track.name), 24), 4, y + 14);
    for (const [name, start, length] of track.spans) {
      if (start + length < state.from || start > state.to) continue;
      const x = Math.max(state.left + (start - state.from) * scale, state.left);
      const end = Math.min(state.left + (start + length - state.from) * scale, width);
      context.fillStyle = color(`--c${(name % 8) + 1}`);
      context.fillRect(x, y + 2, Math.max(end - x, 0.7), state.row - 4);
      if (end - x > 60) {
        context.fillStyle = color("--page");
        context.fillText(short(plain(data.names[name]), Math.floor((end - x) / 7)), x + 4, y + 14);
      }
    }
  });
  context.fillStyle = color("--muted");
  for (const mark of ticks(state.from, state.to, 6))
    context.fillText(
      seconds(mark),
      state.left + (mark - state.from) * scale,
      data.tracks.length * state.row + 15,
    );
}
