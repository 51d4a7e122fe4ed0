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
  return el("section", { class: "trajectory" },
    episodeHead(parts, group, member, place, query),
    member.error ? el("pre", { class: "error panel" }, shown(member.error)) : null,
    other ? differenceLine(difference, columns) : null,
    bar, columns);
};

function episodeHead(parts, group, member, place, query) {
  const scores = group.members.map((one) => one.score);
  const low = Math.min(...scores, 0);
  const high = Math.max(...scores, low + 1e-9);
  const tabs = el("nav", { class: "siblings", "aria-label": "siblings" }, group.members.map((one, at_) => el("a", {
    href: linkTo(...parts.slice(0, 4), at_), class: at_ === place ? "current" : "", title: `score ${number(one.score)}, ${one.status}`,
  }, el("span", { class: "bead", style: { "background-color": one.status === "failed" ? "var(--bad)" : scoreColor(one.score, low, high) } }), one.is_baseline ? "greedy" : one.role && one.role !== "agent" ? `${one.sibling} ${one.role}` : `sibling ${one.sibling || 0}`, el("small", {}, number(one.score)))));
  const rewards = Object.entries(member.outcome_rewards || {}).map(([name, value]) => `${name} ${number(value)}`);
  const facts = [
    ["score", number(member.score)], ["ended", member.status + (member.limit ? ` by ${member.limit}` : "")],
    ["turns", member.turns.length], ["contexts", contextCount(member.turns)], ["sampled tokens", number(tokensOf(member))],
    ["seconds", number(member.turns.reduce((sum, turn) => sum + (turn.generate_s || 0) + (turn.step_s || 0), 0))],
  ];
  if (rewards.length) facts.splice(1, 0, ["rewards", rewards.join(", ")]);
  return el("div", { class: "page-head" }, el("h1", {}, shown(group.task.id || ""), el("span", { class: "muted" }, ` · sibling ${member.sibling || 0}`)),
    el("dl", { class: "facts" }, facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, shown(String(value)))))), tabs);
}

function toolBar(view, columns, query) {
  const color = el("select", { "aria-label": "colour of tokens", id: "color" }, Object.entries(VALUES).map(([name, value]) => el("option", { value: name, selected: name === choices.color }, value.title)));
  const legendBox = el("span", { class: "legend" });
  view.recolor = () => {
    const scale = scaleOf(choices.color, view.members);
    view.paint = (turn) => (t, cell) => { cell.style.backgroundColor = colorOf(choices.color, VALUES[choices.color].of(turn, t), scale); };
    for (const cell of columns.querySelectorAll(".sampled .tok")) view.paint(cell.token.turn)(cell.token.t, cell);
    const reason = lacking(choices.color, view.members);
    replaceChildren(legendBox, reason ? el("span", { class: "muted small" }, reason) : scaleLegend(choices.color, scale));
  };
  color.addEventListener("change", () => { choices.color = color.value; remember(); view.recolor(); });
  const prompts = el("select", { "aria-label": "prompts" }, [["messages", "as messages"], ["tokens", "as tokens"], ["hidden", "hidden"]].map(([value, title]) => el("option", { value, selected: value === choices.prompts }, title)));
  prompts.addEventListener("change", () => { choices.prompts = prompts.value; remember(); fillColumns(view, columns); });
  const chosen = query.has("with") ? Number(query.get("with")) : -1;
  const others = view.group.members.map((one, place) => [one, place]).filter(([one]) => one !== view.members[0]);
  const compare = el("select", { "aria-label": "beside", id: "beside" }, el("option", { value: "" }, "no other sibling"), others.map(([one, place]) => el("option", { value: place, selected: place === chosen }, `sibling ${one.sibling || 0}${one.is_baseline ? " (greedy)" : ""}, score ${number(one.score)}`)));
  compare.addEventListener("change", () => { location.hash = linkTo(...view.parts.slice(0, 5)) + (compare.value === "" ? "" : `?with=${compare.value}`); });
  view.recolor();
  return el("div", { class: "toolbar" }, el("label", {}, "colour ", color), legendBox, el("label", {}, "prompts ", prompts), el("label", {}, "beside ", compare), copyMenu(view));
}

function remember() {
  try {
    localStorage.setItem(COLOR_KEY, JSON.stringify(choices));
  } catch { /* a browser may forbid it for pages from disk */ }
}

try {
  Object.assign(choices, JSON.parse(localStorage.getItem(COLOR_KEY) || "{}"));
  if (!(choices.color in VALUES)) choices.color = "logprob";
} catch { /* the defaults stay */ }

function copyMenu(view) {
  const member = view.members[0];
  const button = (title, make) => {
    const it = el("button", { type: "button" }, title);
    it.addEventListener("click", () => copy(make(), it));
    return it;
  };
  return el("span", { class: "copies" }, el("span", { class: "muted" }, "copy "),
    button("prompt", () => promptText(view.data, member)),
    button("ids", () => JSON.stringify(member.turns.map((turn) => ({ prompt_ids: turn.prompt_ids, response_ids: turn.response_ids })))),
    button("replay command", () => replayCommand(view)));
}

// The first context's prompt as the model saw it: its tokens' texts, or its messages where there is no tokenizer.
function promptText(data, member) {
  const turn = member.turns[0];
  if (!turn) return "";
  if (data.texts) return turn.prompt_text || turn.prompt_ids.map((id) => data.texts[id]).join("");
  return (turn.messages || []).map((message) => `${message.role}: ${contentText(message.content)}`).join("\n");
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
  replaceChildren(columns, view.members.map((member, side) => {
    const lanes = lanesOf(member.turns);
    const states = stateCounts(view.group);
    const title = view.members.length > 1 ? el("h2", { class: "column-title" }, `sibling ${member.sibling || 0}`, el("small", {}, ` score ${number(member.score)}`)) : null;
    return el("div", { class: "column", data: { side } }, title, turnStrip(member, states, side), toolsPart(view.data, member),
      member.turns.map((turn, i) => turnCard(view, member, turn, i, lanes, states, side)),
      member.turns.length ? null : el("p", { class: "empty" }, "It has no turn."));
  }));
}

// How many turns of the group were played in which state: the buckets of GiGPO.
function stateCounts(group) {
  const counts = new Map();
  for (const member of siblings(group)) for (const turn of member.turns) {
    const key = stateText(turn.state_key);
    if (key) counts.set(key, (counts.get(key) || 0) + 1);
  }
  return counts;
}

// What each turn and those after it earned, rewards of the whole episode included.
function returnsOf({ turns, outcome_rewards: outcome }) {
  const returns = [];
  let sum = Object.values(outcome || {}).reduce((total, value) => total + value, 0);
  for (let i = turns.length - 1; i >= 0; i -= 1) {
    sum += turns[i].reward || 0;
    returns[i] = sum;
  }
  return returns;
}

function meanAdvantage(turn) {
  if (turn.advantage === undefined) return null;
  return Array.isArray(turn.advantage) ? mean(turn.advantage) : turn.advantage;
}

function turnStrip(member, states, side) {
  const returns = returnsOf(member);
  const top = Math.max(...member.turns.map((turn) => Math.abs(meanAdvantage(turn) || 0)), 1e-9);
  return el("div", { class: "strip" }, member.turns.map((turn, i) => {
    const advantage = meanAdvantage(turn);
    const state = stateText(turn.state_key);
    const item = el("button", { type: "button", class: `turn-tile${turn.reward ? " rewarded" : ""}`, data: { turn: i } },
      el("span", { class: "tile-head" }, el("b", {}, i + 1), turn.finish_reason && turn.finish_reason !== "stop" ? el("span", { class: "badge truncated" }, turn.finish_reason) : null),
      el("span", { class: "tile-action mono" }, shown(short(turn.action === undefined ? turn.text || "" : turn.action, 16) || "–")),
      el("span", { class: "tile-line" }, "reward ", el("b", {}, number(turn.reward || 0)), " · return ", el("b", {}, number(returns[i]))),
      state ? el("span", { class: "tile-line mono", title: plain(state) }, shown(ending(state, 11)), ` ×${states.get(state) || 1}`) : null,
      el("span", { class: "tile-line" }, seconds((turn.generate_s || 0) + (turn.step_s || 0))),
      advantage === null ? null : el("span", { class: "tile-bar", title: `advantage ${number(advantage)}`, style: { "background-color": `color-mix(in srgb, ${advantage > 0 ? "var(--plus)" : "var(--minus)"} ${Math.round((Math.abs(advantage) / top) * 100)}%, transparent)` } }));
    item.addEventListener("click", () => showTurn(i, side));
    return item;
  }));
}

function showTurn(i, side = 0) {
  const card = document.querySelectorAll(`.column[data-side="${side}"] .turn`)[i];
  if (!card) return;
  selectItem(card);
  card.scrollIntoView({ block: "start" });
  const { parts, query } = readLink();
  history.replaceState(null, "", linkTo(...parts.slice(0, 5), i + 1) + (query.size ? `?${query}` : ""));
}

function toolsPart(data, member) {
  const own = [...new Set(member.turns.map((turn) => turn.tools).filter((index) => index !== undefined))];
  if (!own.length) return null;
  const names = own.flatMap((index) => data.tools[index]).map((tool) => (tool.function || tool).name);
  return el("details", { class: "tools" }, el("summary", {}, `${counted(names.length, "tool")}: `, el("span", { class: "mono" }, shown(names.join(", ")))),
    own.flatMap((index) => data.tools[index]).map((tool) => el("pre", { class: "text" }, shown(JSON.stringify(tool, null, 1)))));
}

function turnCard(view, member, turn, i, lanes, states, side) {
  const place = lanes.places[i];
  const card = el("article", { class: "turn item", tabindex: "-1", data: { turn: i }, "aria-label": `turn ${i + 1}` });
  const head = el("div", { class: "turn-head" }, el("b", {}, `turn ${i + 1}`),
    place.startsContext ? el("span", { class: "badge context" }, i === 0 ? "context" : `new context${place.from === null ? "" : `, off turn ${place.from + 1}`}`) : null,
    place.isBranch ? el("span", { class: "badge context" }, `continues turn ${place.from + 1}`) : null,
    turn.is_greedy ? el("span", { class: "badge" }, "greedy") : null,
    turn.is_untrained ? el("span", { class: "badge filtered" }, "not trained on") : null,
    el("span", { class: "muted small" }, `+${number(turn.prompt_ids.length)} prompt, +${number(turn.response_ids.length)} sampled`));
  const body = el("div", { class: "turn-body" }, promptPart(view, turn), responsePart(view, turn, i, side), outcomePart(turn, states));
  append(card, [lanes.count > 1 ? laneGutter(lanes, member.turns, i) : null, el("div", { class: "turn-content" }, head, body)]);
  if (lanes.count > 1) card.classList.add("with-lanes");
  return card;
}

function promptPart(view, turn) {
  if (choices.prompts === "hidden") return null;
  if (choices.prompts === "tokens") return el("div", { class: "message role-prompt" }, el("span", { class: "role" }, "prompt"), el("div", { class: "body" }, tokenCells(turn.prompt_ids, view.data, { className: "prompt" })));
  if (turn.messages) return turn.messages.slice(0, -1).map(messageBlock);
  const text = turn.prompt_text || turn.observation || "";
  return text ? messageBlock({ role: turn.prompt_text ? "prompt" : "user", content: text }) : null;
}

function responsePart(view, turn, i, side) {
  const difference = view.difference && view.difference.turn === i && view.difference.part === "response" ? view.difference.t : null;
  const paint = view.paint(turn);
  const cells = tokenCells(turn.response_ids, view.data, {
    className: "sampled",
    atLeast: difference || 0,
    place: { turn, turnIndex: i, side },
    paint: (t, cell) => { paint(t, cell); if (t === difference) cell.classList.add("first-difference"); },
  });
  const reply = turn.messages ? turn.messages[turn.messages.length - 1] : null;
  const calls = reply ? [...(reply.tool_calls || []).map(callBlock), ...(reply.call_errors || []).map((fault) => el("div", { class: "call fault" }, shown(String(fault))))] : [];
  return el("div", { class: "message role-assistant" }, el("span", { class: "role" }, "assistant"),
    el("div", { class: "body" }, turn.response_ids.length ? cells : null, turn.response_ids.length && view.data.texts ? null : textBlock(turn.text || ""), calls.length ? el("div", { class: "calls" }, calls) : null));
}

function outcomePart(turn, states) {
  const facts = [];
  if (turn.action !== undefined) facts.push(el("span", {}, "action ", el("b", { class: "mono" }, shown(valueText(turn.action)))));
  facts.push(el("span", { class: turn.reward ? "strong" : "" }, `reward ${number(turn.reward || 0)}`));
  const advantage = meanAdvantage(turn);
  if (advantage !== null) facts.push(el("span", {}, `advantage ${number(advantage)}`));
  for (const [name, value] of Object.entries(turn.metrics || {})) facts.push(el("span", { class: "muted" }, shown(`${name} ${number(value)}`)));
  const state = stateText(turn.state_key);
  if (state && state !== turn.observation) facts.push(el("span", { class: "muted", title: plain(state) }, "state ", el("span", { class: "mono" }, shown(short(state, 40))), ` (${counted(states.get(state) || 1, "turn")} of the group)`));
  if (turn.finish_reason && turn.finish_reason !== "stop") facts.push(el("span", { class: "badge truncated" }, `finish ${turn.finish_reason}`));
  const sampling = Object.entries(turn.sampling || {}).filter(([name]) => name !== "max_new_tokens").map(([name, value]) => `${name} ${valueText(value)}`);
  if (sampling.length) facts.push(el("span", { class: "muted" }, shown(sampling.join(", "))));
  facts.push(el("span", { class: "muted" }, `sampled in ${seconds(turn.generate_s)}${turn.step_s ? `, step ${seconds(turn.step_s)}` : ""}`));
  return el("div", { class: "outcome" }, facts);
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
  const what = { prompt: "in the prompt, token", response: "in the response, token", end: "one of them ends before it" }[difference.part];
  const button = el("button", { type: "button" }, "go there");
  button.addEventListener("click", () => {
    const mark = columns.querySelector(".first-difference") || columns.querySelectorAll(`.column .turn[data-turn="${difference.turn}"]`)[0];
    if (mark) mark.scrollIntoView({ block: "center" });
  });
  return el("p", { class: "note" }, `They differ from turn ${difference.turn + 1} on, ${what}${difference.part === "end" ? "" : ` ${difference.t + 1}`}. `, button);
}

turnwise.afterTrajectory = (parts) => {
  if (parts.length > 5) showTurn(Number(parts[5]) - 1);
};
