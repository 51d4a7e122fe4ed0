// Which page is shown, how one moves between pages, and what is new in a run that goes on.
"use strict";

const DEPTHS = ["run", "run", "run", "step", "task", "trajectory", "trajectory"];
const page = document.getElementById("page");
const infoLine = document.getElementById("info");
let visit = 0;

function route() {
  const { parts, query } = readLink();
  if (parts[0] === "search") return { name: "search", parts: [], query };
  if (parts[1] === "timeline") return { name: "timeline", parts: [Number(parts[0])], query };
  const named = parts.slice(0, 6).map((part, place) => (place === 1 ? part : Number(part)));
  return { name: DEPTHS[Math.min(named.length, 6)], parts: named, query };
}

async function show(keepsPlace = false) {
  visit += 1;
  const own = visit;
  const { name, parts, query } = route();
  const top = window.scrollY;
  infoLine.hidden = true;
  drawTop(name, parts, query);
  let content;
  try {
    if (parts.length && !turnwise.runs[parts[0]]) throw new Error("there is no such run here");
    if (parts.length > 2 && !kindOf(parts[0], parts[1]))
      throw new Error(`this run has no ${KINDS[parts[1]] || parts[1]} episodes here`);
    content = await turnwise.pages[name](parts, query);
  } catch (fault) {
    content = el("p", { class: "empty" }, `This page can't be shown: ${fault.message}`);
  }
  if (own !== visit) return;
  replaceChildren(page, content);
  document.querySelector("nav.crumbs").replaceWith(crumbsOf(name, parts));
  document.title = plain(titleOf(name, parts));
  window.scrollTo(0, keepsPlace ? top : 0);
  if (name === "trajectory") turnwise.afterTrajectory(parts);
  document.body.dataset.shown = location.hash || "#/";
}

function titleOf(name, parts) {
  const run = turnwise.runs[parts[0] || 0];
  if (name === "search") return "search · turnwise view";
  if (name === "timeline") return `time · ${run.name}`;
  const words = parts.length > 2 ? [stepTitle(parts[1], parts[2])] : [];
  if (parts.length > 3) words.unshift(`group ${parts[3]}`);
  if (parts.length > 4) words.unshift(episodeName(parts));
  return [...words, run ? run.name : "turnwise view"].join(" · ");
}

function crumbsOf(name, parts) {
  const crumbs = [
    el("a", { href: "#/", class: "brand" }, el("span", { class: "logo", "aria-hidden": "true" }), "turnwise"),
  ];
  const add = (href, ...words) =>
    crumbs.push(el("span", { class: "slash" }, "/"), el("a", { href }, ...words));
  if (parts.length) add("#/", shown(turnwise.runs[parts[0]] ? turnwise.runs[parts[0]].name : "?"));
  if (name === "timeline") add(linkTo(parts[0], "timeline"), "time");
  if (parts.length > 2) add(linkTo(...parts.slice(0, 3)), stepTitle(parts[1], parts[2]));
  if (parts.length > 3) add(linkTo(...parts.slice(0, 4)), `group ${parts[3]}`);
  if (parts.length > 4) add(linkTo(...parts.slice(0, 5)), episodeName(parts));
  return el("nav", { class: "crumbs" }, crumbs);
}

// A link holds an episode's place in its group; its name is known once the step is read.
function episodeName(parts) {
  const data = turnwise.caches.steps.get(parts.slice(0, 3).join("/"));
  const group = data && data.groups.find((one) => one.index === parts[3]);
  const member = group && group.members[parts[4]];
  return member ? siblingName(member) : "episode";
}

function drawTop(name, parts, query) {
  const box = el("input", {
    type: "search",
    id: "search",
    placeholder: "search  /",
    value: query.get("q") || "",
    "aria-label": "search",
    spellcheck: "false",
    title: SEARCH_HELP,
  });
  const form = el("form", { role: "search" }, box);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    location.hash = `#/search?q=${encodeURIComponent(box.value)}`;
  });
  const theme = el("button", { type: "button", class: "plain", title: "light or dark (t)" }, "◐");
  theme.addEventListener("click", switchTheme);
  const help = el("button", { type: "button", class: "plain", title: "keys (?)" }, "?");
  help.addEventListener("click", toggleHelp);
  const live = turnwise.isLive ? el("span", { class: "live", title: "the run is watched" }, "live") : null;
  replaceChildren(
    document.getElementById("top"),
    crumbsOf(name, parts),
    el(
      "div",
      { class: "top-tools" },
      live,
      el("a", { href: linkTo(parts[0] || 0, "timeline") }, "Time"),
      form,
      theme,
      help,
    ),
  );
}

// Light and dark: the system's, unless chosen here.
const THEME_KEY = "turnwise-theme";

function switchTheme() {
  const root = document.documentElement;
  const isDark = root.dataset.theme
    ? root.dataset.theme === "dark"
    : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = isDark ? "light" : "dark";
  try {
    localStorage.setItem(THEME_KEY, root.dataset.theme);
  } catch {
    /* a browser may forbid it for pages from disk */
  }
}

try {
  const theme = localStorage.getItem(THEME_KEY);
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch {
  /* the system's theme stays */
}

// Keys.
const KEYS = [
  ["j / k", "next, previous row or turn"],
  ["Enter", "open the row"],
  ["u", "one level up"],
  ["h / l", "previous, next sibling, group or step"],
  ["c", "the next colour of tokens"],
  ["b", "this sibling beside the next one"],
  ["f", "to the first difference"],
  ["/", "search"],
  ["g", "the run"],
  ["t", "light or dark"],
  ["?", "this list"],
];

function items() {
  return [...page.querySelectorAll(".rows > tr[data-href], .column[data-side='0'] .item")].filter(
    (item) => item.offsetParent !== null,
  );
}

function selectItem(item) {
  for (const other of page.querySelectorAll(".selected")) other.classList.remove("selected");
  if (!item) return;
  item.classList.add("selected");
}

function move(by) {
  const all = items();
  if (!all.length) return;
  const at_ = all.findIndex((item) => item.classList.contains("selected"));
  const next = all[at_ < 0 ? (by > 0 ? 0 : all.length - 1) : Math.min(Math.max(at_ + by, 0), all.length - 1)];
  if (next.classList.contains("turn")) showTurn(Number(next.dataset.turn));
  else {
    selectItem(next);
    next.scrollIntoView({ block: "nearest" });
  }
}

function openSelected() {
  const item = page.querySelector(".selected[data-href]");
  if (item) location.hash = item.dataset.href;
}

async function sideways(by) {
  const { name, parts, query } = route();
  if (name === "step") {
    const steps = kindOf(parts[0], parts[1]).steps.map((row) => row.step);
    const next = steps[steps.indexOf(parts[2]) + by];
    if (next !== undefined) location.hash = linkTo(...parts.slice(0, 2), next);
  }
  if (name !== "task" && name !== "trajectory") return;
  const data = await stepData(parts[0], parts[1], parts[2]);
  if (name === "task") {
    const indexes = data.groups.map((group) => group.index);
    const next = indexes[indexes.indexOf(parts[3]) + by];
    if (next !== undefined) location.hash = linkTo(...parts.slice(0, 3), next);
    return;
  }
  const members = data.groups.find((group) => group.index === parts[3]).members;
  const next = parts[4] + by;
  if (members[next])
    location.hash =
      linkTo(...parts.slice(0, 4), next) +
      (query.has("with") && Number(query.get("with")) !== next ? `?with=${query.get("with")}` : "");
}

function up() {
  const { name, parts } = route();
  if (name === "trajectory") location.hash = linkTo(...parts.slice(0, 4));
  else if (name === "task") location.hash = linkTo(...parts.slice(0, 3));
  else location.hash = "#/";
}

function nextColor() {
  const color = document.getElementById("color");
  if (!color) return;
  color.selectedIndex = (color.selectedIndex + 1) % color.options.length;
  color.dispatchEvent(new Event("change"));
}

function besideNext() {
  const beside = document.getElementById("beside");
  if (!beside) return;
  beside.selectedIndex = (beside.selectedIndex + 1) % beside.options.length;
  beside.dispatchEvent(new Event("change"));
}

function toFirstDifference() {
  const mark = page.querySelector(".first-difference");
  if (mark) mark.scrollIntoView({ block: "center" });
}

function toggleHelp() {
  const existing = document.getElementById("help");
  if (existing) {
    existing.remove();
    return;
  }
  const box = el(
    "div",
    { id: "help", role: "dialog", "aria-label": "keys" },
    el(
      "div",
      {},
      el("h2", {}, "Keys"),
      el(
        "table",
        {},
        KEYS.map(([key, text]) => el("tr", {}, el("td", {}, el("kbd", {}, key)), el("td", {}, text))),
      ),
      el("p", { class: "muted small" }, `Search: ${SEARCH_HELP}`),
    ),
  );
  box.addEventListener("click", toggleHelp);
  document.body.append(box);
}

const ACTIONS = {
  j: () => move(1),
  k: () => move(-1),
  Enter: openSelected,
  u: up,
  h: () => sideways(-1),
  l: () => sideways(1),
  c: nextColor,
  b: besideNext,
  f: toFirstDifference,
  g: () => {
    location.hash = "#/";
  },
  t: switchTheme,
  "?": toggleHelp,
  "/": () => document.getElementById("search").focus(),
};

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const isTyping = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
  if (event.key === "Escape") {
    event.target.blur();
    const help = document.getElementById("help");
    if (help) help.remove();
    return;
  }
  if (isTyping || !Object.hasOwn(ACTIONS, event.key)) return;
  if (event.key === "Enter" && /^(A|BUTTON|SUMMARY)$/.test(event.target.tagName)) return;
  event.preventDefault();
  ACTIONS[event.key]();
});

document.addEventListener("click", (event) => {
  const row = event.target.closest("tr[data-href]");
  if (row && !event.target.closest("a, button, input, select") && !String(getSelection()))
    location.hash = row.dataset.href;
});

// The value under the pointer.
function showToken(cell) {
  if (!cell || !cell.token) return;
  for (const other of page.querySelectorAll(".tok.under")) other.classList.remove("under");
  cell.classList.add("under");
  replaceChildren(
    infoLine,
    tokenFacts(cell.token).map(([name, value]) =>
      el("span", {}, el("span", { class: "muted" }, `${name} `), el("b", { class: "mono" }, shown(value))),
    ),
  );
  infoLine.hidden = false;
}

page.addEventListener("mouseover", (event) => showToken(event.target.closest(".tok")));

// A run that goes on: a small script says what is new; the index is read again only then.
const LOOK_MS = 2000;

async function look() {
  try {
    await loadScript(`head.js?${Date.now()}`);
    if (turnwise.newest !== turnwise.seen) {
      const isFirst = turnwise.seen === undefined;
      turnwise.seen = turnwise.newest;
      if (!isFirst) await renew();
    }
    document.body.classList.remove("lost");
  } catch {
    document.body.classList.add("lost");
  }
  setTimeout(look, LOOK_MS);
}

async function renew() {
  const before = turnwise.runs.flatMap((run) =>
    run.kinds.flatMap((kind) => kind.steps.map((row) => row.step)),
  );
  await loadScript(`index.js?${Date.now()}`);
  turnwise.caches.steps.clear();
  const after = turnwise.runs.flatMap((run) =>
    run.kinds.flatMap((kind) => kind.steps.map((row) => row.step)),
  );
  if (after.length > before.length) notify(`new: step ${after[after.length - 1]}`);
  if (route().name === "run") show(true);
}

window.addEventListener("hashchange", () => show());

loadScript("index.js").then(
  () => {
    show();
    if (turnwise.isLive) look();
  },
  (fault) => replaceChildren(page, el("p", { class: "empty" }, fault.message)),
);
