// The page of a run: its curve, what its health checks said, what was set, and its steps. Several runs stand
// side by side.
"use strict";

const HEADLINES = [/^env\/.+\/success$/, /^rollout\/score\/mean$/, /^sft\/loss$/];
const VAL_HEADLINES = [/^val\/env\/.+\/success$/, /^val\/score\/mean$/];

turnwise.pages.run = (parts, query) => {
  const chosen = turnwise.runs.map((run, place) => [run, place]);
  const metric = query.get("metric") || "";
  return el(
    "section",
    { class: "run-page" },
    chosen.length === 1 ? runTitle(...chosen[0]) : el("h1", {}, `${chosen.length} runs`),
    curvePanel(metric),
    el(
      "div",
      { class: chosen.length > 1 ? "side-by-side" : "" },
      chosen.map(([run, place]) => runPart(run, place)),
    ),
  );
};

function metricSeries(metrics, pattern) {
  if (!metrics || !metrics.values) return [];
  const names = Object.keys(metrics.values).filter((name) => pattern.test(name));
  const isValidation = names.some((name) => /^(val\/|sft\/val_loss)/.test(name));
  const points = [];
  metrics.step.forEach((step, place) => {
    const values = names
      .map((name) => metrics.values[name][place])
      .filter((value) => value !== null && value !== undefined);
    if (values.length) points.push([step + (isValidation ? 0 : 1), mean(values)]);
  });
  return points;
}

function firstSeries(metrics, patterns) {
  for (const pattern of patterns) {
    const points = metricSeries(metrics, pattern);
    if (points.length)
      return {
        points,
        name: pattern === HEADLINES[2] ? "loss" : pattern.source.includes("success") ? "success" : "score",
      };
  }
  return null;
}

// Without metrics, as for a file of rollouts alone, the curve is the mean score of each step.
function scoreSeries(kind) {
  return kind.steps
    .filter((row) => row.score && scoresOf(row).length)
    .map((row) => [row.step, mean(scoresOf(row))]);
}

function curvePanel(metric) {
  const runs = turnwise.runs;
  const series = [];
  const marks = [];
  runs.forEach((run, place) => {
    const metrics = run.about.metrics;
    const prefix = runs.length > 1 ? `${run.name}: ` : "";
    const color = COLORS[(place * 2) % COLORS.length];
    if (metric) {
      const points = metricSeries(metrics, new RegExp(`^${metric.replace(/[.*+?^${}()|[\]\\]/g, "\\$&")}$`));
      if (points.length) series.push({ name: prefix + metric, color, points });
      return;
    }
    const training = firstSeries(metrics, HEADLINES);
    if (training)
      series.push({ name: `${prefix}${training.name}, training`, color, points: training.points });
    const validation = firstSeries(metrics, VAL_HEADLINES);
    if (validation)
      series.push({
        name: `${prefix}${validation.name}, validation`,
        color: COLORS[(place * 2 + 1) % COLORS.length],
        points: validation.points,
        hasDots: true,
      });
    if (!training && !validation)
      for (const kind of run.kinds)
        series.push({ name: `${prefix}mean score`, color, points: scoreSeries(kind), hasDots: true });
    for (const sentence of run.about.health || []) marks.push([sentence.step, sentence.text]);
  });
  const names = [
    ...new Set(runs.flatMap((run) => Object.keys((run.about.metrics || { values: {} }).values || {}))),
  ].sort();
  const list = el(
    "datalist",
    { id: "metric-names" },
    names.map((name) => el("option", { value: name })),
  );
  const input = el("input", {
    type: "text",
    list: "metric-names",
    placeholder: "success or score",
    value: metric,
    "aria-label": "metric",
    spellcheck: "false",
    class: "metric",
  });
  input.addEventListener("change", () => {
    location.hash = `#/?metric=${encodeURIComponent(input.value)}`;
  });
  const first = runs.findIndex((run) => run.kinds.length);
  const openStep = (step) => {
    const kind = first >= 0 && runs[first].kinds.find((one) => one.steps.some((row) => row.step === step));
    if (kind) location.hash = linkTo(first, kind.kind, step);
    else notify(`the episodes of step ${step} aren't here`);
  };
  return el(
    "div",
    { class: "panel" },
    el(
      "div",
      { class: "panel-head" },
      el("h2", {}, metric || "Curve"),
      el("label", { class: "muted small" }, "metric ", input),
      list,
    ),
    curveChart(series, { marks, onStep: openStep, label: metric || "success and score over steps" }),
    el("p", { class: "muted small" }, "Click a step to see its groups. A ▾ is where a health check spoke."),
  );
}

function runTitle(run, place) {
  const time =
    turnwise.runs.length > 1
      ? [" ", el("a", { class: "small", href: linkTo(place, "timeline") }, "time")]
      : null;
  return el(
    "div",
    {},
    el("h1", {}, shown(run.name), time),
    el("p", { class: "muted mono small path" }, shown(run.path)),
  );
}

function runPart(run, place) {
  const about = run.about;
  return el(
    "div",
    { class: "run" },
    turnwise.runs.length > 1 ? runTitle(run, place) : null,
    (about.notes || []).map((note) => el("p", { class: "note" }, shown(note))),
    healthPart(about.health || []),
    run.kinds.map((kind) => stepsPart(run, place, kind)),
    settingsPart(about),
    checkpointsPart(about.checkpoints || []),
  );
}

function healthPart(sentences) {
  if (!sentences.length) return null;
  return el(
    "div",
    { class: "panel health" },
    el("h2", {}, "Health"),
    sentences.map((sentence) =>
      el(
        "p",
        {},
        el("span", { class: "badge stale" }, sentence.key.replaceAll("_", " ")),
        " ",
        shown(sentence.text),
      ),
    ),
  );
}

function stepsPart(run, place, kind) {
  const rows = [...kind.steps].reverse();
  const scores = kind.steps.flatMap((row) =>
    row.score ? [Math.min(...row.score), Math.max(...row.score)] : [],
  );
  const low = scores.length ? Math.min(...scores) : 0;
  const high = scores.length ? Math.max(...scores) : 1;
  const title = kind.kind === "train" ? "Steps" : kind.kind === "val" ? "Validations" : "Batches";
  const notes = [];
  if (kind.every > 1) notes.push(`every ${kind.every}th step of a large file is shown; --steps names others`);
  if (kind.damaged) notes.push(`${counted(kind.damaged, "line")} can't be read`);
  return el(
    "div",
    { class: "panel" },
    el(
      "div",
      { class: "panel-head" },
      el("h2", {}, title),
      el("span", { class: "muted small" }, [counted(rows.length, "step"), ...notes].join(" · ")),
    ),
    rows.length
      ? el(
          "div",
          { class: "scroll" },
          el(
            "table",
            { class: "list" },
            head(["step", "#groups", "#mean score", "scores of episodes", "#failed", "#filtered", "#tokens"]),
            el(
              "tbody",
              { class: "rows" },
              rows.map((row) => stepRow(place, kind.kind, row, low, high)),
            ),
          ),
        )
      : el("p", { class: "empty" }, "No step has ended yet."),
  );
}

function stepRow(place, kind, row, low, high) {
  const parts = [place, kind, row.step];
  if (!row.score)
    return el(
      "tr",
      { data: { href: linkTo(...parts) } },
      el("td", {}, link(parts, row.step)),
      el("td", { colspan: 6, class: "muted" }, "not read yet"),
    );
  const groups = groupsOf(row);
  const failed = [...row.status].filter((letter) => letter === "x").length;
  const filtered = groups.filter((group) => group.rejected).length;
  const scores = scoresOf(row);
  return el(
    "tr",
    { data: { href: linkTo(...parts) } },
    el("td", {}, link(parts, row.step)),
    el("td", { class: "num" }, groups.length),
    el("td", { class: "num" }, meanText(scores)),
    el("td", {}, histogram(scores, low, high)),
    el("td", { class: "num" }, failed ? el("span", { class: "badge failed" }, failed) : "–"),
    el("td", { class: "num" }, filtered || "–"),
    el("td", { class: "num" }, number(row.tokens.reduce((sum, count) => sum + count, 0))),
  );
}

// How many episodes have which score, from low to high.
function histogram(scores, low, high) {
  const bins = 24;
  const counts = new Array(bins).fill(0);
  const span = high - low || 1;
  for (const score of scores) counts[Math.min(bins - 1, Math.floor(((score - low) / span) * bins))] += 1;
  const top = Math.max(...counts);
  return svg(
    "svg",
    {
      viewBox: "0 0 144 20",
      class: "histogram",
      role: "img",
      "aria-label": `${scores.length} scores from ${number(low)} to ${number(high)}`,
    },
    counts.map((count, place) =>
      count
        ? svg(
            "rect",
            {
              x: place * 6,
              width: 5,
              y: 20 - Math.max(2, (count / top) * 19),
              height: Math.max(2, (count / top) * 19),
              style: { fill: scoreColor(low + ((place + 0.5) / bins) * span, low, high) },
            },
            svg("title", {}, `${count} near ${number(low + ((place + 0.5) / bins) * span)}`),
          )
        : null,
    ),
  );
}

function settingsPart(about) {
  const settings = about.settings || [];
  if (!settings.length) return null;
  const title = about.settings_are_all ? "Settings" : "Settings that differ from their defaults";
  return el(
    "details",
    { class: "panel", open: !about.settings_are_all },
    el("summary", {}, el("h2", {}, title), el("span", { class: "muted small" }, ` ${settings.length}`)),
    el(
      "table",
      { class: "settings" },
      el(
        "tbody",
        {},
        settings.map(([key, value]) =>
          el(
            "tr",
            {},
            el("td", { class: "mono" }, shown(key)),
            el("td", { class: "mono" }, shown(valueText(value))),
          ),
        ),
      ),
    ),
  );
}

function checkpointsPart(checkpoints) {
  if (!checkpoints.length) return null;
  return el(
    "div",
    { class: "panel" },
    el("h2", {}, "Checkpoints"),
    el(
      "ul",
      { class: "mono small" },
      checkpoints.map((path) => el("li", {}, shown(path))),
    ),
  );
}
