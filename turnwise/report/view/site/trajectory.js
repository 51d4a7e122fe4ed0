// The page of an episode: its turns with the messages that the model saw and the tokens that it sampled.
"use strict";

const COLOR_KEY = "turnwise-color";
const choices = { color: "logprob", prompts: "messages" };

turnwise.pages.trajectory = async (parts, query) => {
  const [run, kind, step, index, place] = parts;
  const data = await stepData(run, kind, step);
  const group = data.groups.find((one) => one.index === index);
  const member = group && group.members[place];
  if (!member) return el("p", { class: "empty" }, `There is no such episode in ${stepTitle(kind, step)}.`);
  const other = query.has("with") ? group.members[Number(query.get("with"))] : null;
  const shownMembers = other ? [member, other] : [member];
  const view = { parts, run, data, group, members: shownMembers, paint: null };
  const columns = el("div", { class: `columns${other ? " two" : ""}` });
  const bar = toolBar(view, columns, query);
  const difference = other ? firstDifference(member, other) : null;
  view.difference = difference;
  fillColumns(view, columns);
  return el(
    "section",
    { class: "trajectory" },
    episodeHead(parts, group, member, place, query),
    member.error ? el("pre", { class: "error panel" }, shown(member.error)) : null,
    other ? differenceLine(difference, columns) : null,
    bar,
    columns,
  );
};

function episodeHead(parts, group, member, place, query) {
  const scores = group.members.map((one) => one.score);
  const low = Math.min(...scores, 0);
  const high = Math.max(...scores, low + 1e-9);
  const tabs = el(
    "nav",
    { class: "siblings", "aria-label": "siblings" },
    group.members.map((one, at_) =>
      el(
        "a",
        {
          href: linkTo(...parts.slice(0, 4), at_),
          class: at_ === place ? "current" : "",
          title: `score ${number(one.score)}, ${one.status}`,
        },
        el("span", {
          class: "bead",
          style: {
            "background-color": one.status === "failed" ? "var(--bad)" : scoreColor(one.score, low, high),
          },
        }),
        one.is_baseline
          ? "greedy"
          : one.role && one.role !== "agent"
            ? `${one.sibling} ${one.role}`
            : `sibling ${one.sibling || 0}`,
        el("small", {}, number(one.score)),
      ),
    ),
  );
  const rewards = Object.entries(member.outcome_rewards || {}).map(
    ([name, value]) => `${name} ${number(value)}`,
  );
  const facts = [
    ["score", number(member.score)],
    ["ended", member.status + (member.limit ? ` by ${member.limit}` : "")],
    ["turns", member.turns.length],
    ["contexts", contextCount(member.turns)],
    ["sampled tokens", number(tokensOf(member))],
    [
      "seconds",
      number(member.turns.reduce((sum, turn) => sum + (turn.generate_s || 0) + (turn.step_s || 0), 0)),
    ],
  ];
  if (rewards.length) facts.splice(1, 0, ["rewards", rewards.join(", ")]);
  return el(
    "div",
    { class: "page-head" },
    el(
      "h1",
      {},
      shown(group.task.id || ""),
      el("span", { class: "muted" }, ` · ${siblingName(member)}`),
    ),
    el(
      "dl",
      { class: "facts" },
      facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, shown(String(value))))),
    ),
    tabs,
  );
}

function toolBar(view, columns, query) {
  const color = el(
    "select",
    { "aria-label": "colour of tokens", id: "color" },
    Object.entries(VALUES).map(([name, value]) =>
      el("option", { value: name, selected: name === choices.color }, value.title),
    ),
  );
  const legendBox = el("span", { class: "legend" });
  view.recolor = () => {
    const scale = scaleOf(choices.color, view.members);
    view.paint = (turn) => (t, cell) => {
      cell.style.backgroundColor = colorOf(choices.color, VALUES[choices.color].of(turn, t), scale);
    };
    for (const cell of columns.querySelectorAll(".sampled .tok"))
      view.paint(cell.token.turn)(cell.token.t, cell);
    const reason = lacking(choices.color, view.members);
    replaceChildren(
      legendBox,
      reason ? el("span", { class: "muted small" }, reason) : scaleLegend(choices.color, scale),
    );
  };
  color.addEventListener("change", () => {
    choices.color = color.value;
    remember();
    view.recolor();
  });
  const prompts = el(
    "select",
    { "aria-label": "prompts" },
    [
      ["messages", "as messages"],
      ["tokens", "as tokens"],
      ["hidden", "hidden"],
    ].map(([value, title]) => el("option", { value, selected: value === choices.prompts }, title)),
  );
  prompts.addEventListener("change", () => {
    choices.prompts = prompts.value;
    remember();
    fillColumns(view, columns);
  });
  const chosen = query.has("with") ? Number(query.get("with")) : -1;
  const others = view.group.members
    .map((one, place) => [one, place])
    .filter(([one]) => one !== view.members[0]);
  const compare = el(
    "select",
    { "aria-label": "beside", id: "beside" },
    el("option", { value: "" }, "no other sibling"),
    others.map(([one, place]) =>
      el(
        "option",
        { value: place, selected: place === chosen },
        `${siblingName(one)}, score ${number(one.score)}`,
      ),
    ),
  );
  compare.addEventListener("change", () => {
    location.hash =
      linkTo(...view.parts.slice(0, 5)) + (compare.value === "" ? "" : `?with=${compare.value}`);
  });
  view.recolor();
  return el(
    "div",
    { class: "toolbar" },
    el("label", {}, "colour ", color),
    legendBox,
    el("label", {}, "prompts ", prompts),
    el("label", {}, "beside ", compare),
    copyMenu(view),
  );
}

function remember() {
  try {
    localStorage.setItem(COLOR_KEY, JSON.stringify(choices));
  } catch {
    /* a browser may forbid it for pages from disk */
  }
}

try {
  Object.assign(choices, JSON.parse(localStorage.getItem(COLOR_KEY) || "{}"));
  if (!(choices.color in VALUES)) choices.color = "logprob";
} catch {
  /* the defaults stay */
}

function copyMenu(view) {
  const member = view.members[0];
  const button = (title, make) => {
    const it = el("button", { type: "button" }, title);
    it.addEventListener("click", () => copy(make(), it));
    return it;
  };
  return el(
    "span",
    { class: "copies" },
    el("span", { class: "muted" }, "copy "),
    button("prompt", () => promptText(view.data, member)),
    button("ids", () =>
      JSON.stringify(
        member.turns.map((turn) => ({ prompt_ids: turn.prompt_ids, response_ids: turn.response_ids })),
      ),
    ),
    button("replay command", () => replayCommand(view)),
  );
}

// The first context's prompt as the model saw it: its tokens' texts, or its messages where there is no tokenizer.
function promptText(data, member) {
  const turn = member.turns[0];
  if (!turn) return "";
  if (data.texts) return turn.prompt_text || turn.prompt_ids.map((id) => data.texts[id]).join("");
  return (turn.messages || [])
    .map((message) => `${message.role}: ${contentText(message.content)}`)
    .join("\n");
}

function replayCommand(view) {
  const about = turnwise.runs[view.run].about;
  const file = kindOf(view.run, view.parts[1]).file;
  return `turnwise rollout ${about.config || "CONFIG"} --replay ${quoted(file)}${view.parts[1] === "val" ? " --split val" : ""}`;
}

function quoted(text) {
  return /^[\w./=:@%+-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`;
}

function fillColumns(view, columns) {
  replaceChildren(
    columns,
    view.members.map((member, side) => {
      const lanes = lanesOf(member.turns);
      const states = stateCounts(view.group);
      const title =
        view.members.length > 1
          ? el(
              "h2",
              { class: "column-title" },
              siblingName(member),
              el("small", {}, ` score ${number(member.score)}`),
            )
          : null;
      return el(
        "div",
        { class: "column", data: { side } },
        title,
        turnStrip(member, states, side),
        toolsPart(view.data, member),
        member.turns.map((turn, i) => turnCard(view, member, turn, i, lanes, states, side)),
        member.turns.length ? null : el("p", { class: "empty" }, "It has no turn."),
        spansPart(member, null),
      );
    }),
  );
}

// Where two siblings part: the first turn and token that differ.
function firstDifference(first, second) {
  const turns = Math.min(first.turns.length, second.turns.length);
  for (let i = 0; i < turns; i += 1) {
    for (const part of ["prompt", "response"]) {
      const ids = first.turns[i][`${part}_ids`];
      const others = second.turns[i][`${part}_ids`];
      const length = Math.max(ids.length, others.length);
      for (let t = 0; t < length; t += 1) if (ids[t] !== others[t]) return { turn: i, part, t };
    }
  }
  return first.turns.length === second.turns.length ? null : { turn: turns, part: "end", t: 0 };
}

function differenceLine(difference, columns) {
  if (!difference) return el("p", { class: "note" }, "Both have the same tokens.");
  const what = {
    prompt: "in the prompt, token",
    response: "in the response, token",
    end: "one of them ends before it",
  }[difference.part];
  const button = el("button", { type: "button" }, "go there");
  button.addEventListener("click", () => {
    const mark =
      columns.querySelector(".first-difference") ||
      columns.querySelectorAll(`.column .turn[data-turn="${difference.turn}"]`)[0];
    if (mark) mark.scrollIntoView({ block: "center" });
  });
  return el(
    "p",
    { class: "note" },
    `They differ from turn ${difference.turn + 1} on, ${what}${difference.part === "end" ? "" : ` ${difference.t + 1}`}. `,
    button,
  );
}

turnwise.afterTrajectory = (parts) => {
  if (parts.length > 5) showTurn(Number(parts[5]) - 1);
};
