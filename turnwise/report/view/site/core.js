// What all pages share: elements without markup, data that scripts bring, links, and numbers as text.
"use strict";

const turnwise = {
  runs: [],
  isLive: false,
  pages: {},
  caches: { steps: new Map(), timelines: new Map() },
};

// Elements. Texts become text nodes, never markup: nothing here parses HTML.
const SVG = "http://www.w3.org/2000/svg";

function el(tag, attributes, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

function svg(tag, attributes, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") element.addEventListener(name, value);
    else if (name === "style")
      for (const [key, text] of Object.entries(value)) element.style.setProperty(key, text);
    else if (name === "data") Object.assign(element.dataset, value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  append(element, children);
  return element;
}

function append(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : String(child));
  }
}

function replaceChildren(element, ...children) {
  element.textContent = "";
  append(element, children);
}

// Data. Each file is a script that calls one of the functions below.
function loadScript(name) {
  return new Promise((resolve, reject) => {
    const script = document.createElement("script");
    script.src = `data/${name}`;
    script.onload = () => {
      script.remove();
      resolve();
    };
    script.onerror = () => {
      script.remove();
      reject(new Error(`data/${name} can't be loaded`));
    };
    document.head.append(script);
  });
}

turnwise.index = (text) => {
  const index = JSON.parse(text);
  turnwise.runs = index.runs;
  turnwise.isLive = index.is_live;
};

turnwise.step = (key, text) => {
  const data = JSON.parse(text);
  data.size = text.length;
  turnwise.caches.steps.set(JSON.parse(key), data);
};

turnwise.timeline = (number, text) => {
  turnwise.caches.timelines.set(Number(number), JSON.parse(text));
};

turnwise.head = (text) => {
  turnwise.newest = text;
};

const MAX_STEPS_KEPT = 12;
const MAX_CHARACTERS_KEPT = 150e6;

// Forgets the oldest steps, so that a browser holds a search through gigabytes.
function forgetOld(steps) {
  const isFull = () =>
    steps.size > MAX_STEPS_KEPT ||
    [...steps.values()].reduce((sum, data) => sum + data.size, 0) > MAX_CHARACTERS_KEPT;
  while (steps.size > 1 && isFull()) steps.delete(steps.keys().next().value);
}

async function stepData(run, kind, step) {
  if (!rowOf(run, kind, step)) throw new Error(`${stepTitle(kind, step)} isn't here`);
  const key = `${run}/${kind}/${step}`;
  const steps = turnwise.caches.steps;
  if (!steps.has(key)) {
    await loadScript(`${run}-${kind}-${step}.js`);
    if (steps.has(key)) markTrained(kind, steps.get(key));
    forgetOld(steps);
  }
  return steps.get(key);
}

// Says of each turn whether its tokens were trained on. A file of episodes alone doesn't say what became of
// them, but what was trained on has advantages.
function markTrained(kind, data) {
  for (const group of data.groups)
    for (const member of group.members)
      for (const turn of member.turns) {
        const isOfTraining = kind === "train" || (kind === "file" && turn.advantage !== undefined);
        const isLeftOut = group.rejected || member.is_baseline || turn.is_untrained || turn.is_greedy;
        turn.isTrained = isOfTraining && !isLeftOut;
      }
}

// The index, read back from its columns.
function kindOf(run, kind) {
  const entry = turnwise.runs[run];
  return entry && entry.kinds.find((one) => one.kind === kind);
}

function rowOf(run, kind, step) {
  const entry = kindOf(run, kind);
  return entry && entry.steps.find((row) => row.step === step);
}

const STATUSES = { f: "finished", t: "truncated", x: "failed" };
const REJECTIONS = [null, "failed", "filtered", "stale"];

// Whether the episode in this place of the columns is a greedy baseline, which is no sibling of its group.
function isBaseline(row, at) {
  return Boolean(row.baseline) && row.baseline[at] === "1";
}

// The scores of a step's episodes that count: no baselines, and none that failed.
function scoresOf(row) {
  return row.score.filter((_, at) => row.status[at] !== "x" && !isBaseline(row, at));
}

function groupsOf(row) {
  if (!row.index) return [];
  let start = 0;
  return row.index.map((index, place) => {
    const size = row.size[place];
    const members = Array.from({ length: size }, (_, at_) => ({
      score: row.score[start + at_],
      sibling: row.sibling ? row.sibling[start + at_] : at_,
      is_baseline: isBaseline(row, start + at_),
    }));
    const group = {
      index,
      task: row.task[place],
      tag: row.tag[row.tag.length > 1 ? place : 0],
      rejected: REJECTIONS[Number(row.rejected[place])],
      start,
      size,
      members,
    };
    start += size;
    return group;
  });
}

const KINDS = { train: "training", val: "validation", file: "episodes" };

function stepTitle(kind, step) {
  if (kind === "val") return step === 0 ? "validation before training" : `validation after step ${step}`;
  return `${kind === "file" ? "batch" : "step"} ${step}`;
}

// Links. #/RUN/KIND/STEP/GROUP/SIBLING/TURN names all there is; a page is the depth of its link.
function linkTo(...parts) {
  return `#/${parts.map((part) => encodeURIComponent(part)).join("/")}`;
}

function link(parts, ...children) {
  return el("a", { href: linkTo(...parts) }, ...children);
}

function readLink() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const parts = path.split("/").filter(Boolean).map(decoded);
  return { parts, query: new URLSearchParams(query || "") };
}

function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

// A list's head; a name that begins with # is over numbers.
function head(names) {
  return el(
    "thead",
    {},
    el(
      "tr",
      {},
      names.map((name) =>
        String(name).startsWith("#")
          ? el("th", { class: "num" }, shown(name.slice(1)))
          : el("th", {}, shown(name)),
      ),
    ),
  );
}

// Numbers.
function meanText(values) {
  return values.length ? number(mean(values)) : "–";
}

function number(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  if (Number.isInteger(value)) return (value + 0).toLocaleString("en"); // -0 + 0 is 0
  const size = Math.abs(value);
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  if (size !== 0 && size < 0.001) return value.toExponential(1);
  return String(Number(value.toPrecision(digits)));
}

function seconds(value) {
  if (!value) return "0 s";
  if (value < 1e-3) return `${number(value * 1e6, 2)} µs`;
  if (value < 1) return `${number(value * 1e3, 2)} ms`;
  if (value < 120) return `${number(value, 3)} s`;
  return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
}

function counted(count, noun) {
  return `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;
}

function sum(values) {
  return values.reduce((total, value) => total + value, 0);
}

function mean(values) {
  return values.length ? sum(values) / values.length : 0;
}

function deviation(values) {
  const middle = mean(values);
  return Math.sqrt(mean(values.map((value) => (value - middle) ** 2)));
}

// Whether an episode succeeded; undefined if its environment or rewards don't measure it.
function successOf(member) {
  const success = (member.metrics || {}).success;
  return success === undefined ? undefined : success > 0.5;
}

// What people call an episode of a group, as in --trajectory STEP/GROUP/SIBLING.
function siblingName(member) {
  if (member.is_baseline) return "greedy baseline";
  const role = member.role && member.role !== "agent" ? `, ${member.role}` : "";
  return plain(`sibling ${member.sibling || 0}${role}`);
}
