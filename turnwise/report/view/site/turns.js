// The turns of an episode: the strip above them, and a card for each with its messages, tokens and outcome.
"use strict";

// How many turns of the group were played in which state: the buckets of GiGPO.
function stateCounts(group) {
  const counts = new Map();
  for (const member of siblings(group))
    for (const turn of member.turns) {
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
  return el(
    "div",
    { class: "strip" },
    member.turns.map((turn, i) => {
      const advantage = meanAdvantage(turn);
      const state = stateText(turn.state_key);
      const item = el(
        "button",
        { type: "button", class: `turn-tile${turn.reward ? " rewarded" : ""}`, data: { turn: i } },
        el(
          "span",
          { class: "tile-head" },
          el("b", {}, i + 1),
          turn.finish_reason && turn.finish_reason !== "stop"
            ? el("span", { class: "badge truncated" }, turn.finish_reason)
            : null,
        ),
        el(
          "span",
          { class: "tile-action mono" },
          shown(short(turn.action === undefined ? turn.text || "" : turn.action, 16) || "–"),
        ),
        el(
          "span",
          { class: "tile-line" },
          "reward ",
          el("b", {}, number(turn.reward || 0)),
          " · return ",
          el("b", {}, number(returns[i])),
        ),
        state
          ? el(
              "span",
              { class: "tile-line mono", title: plain(state) },
              shown(ending(state, 11)),
              ` ×${states.get(state) || 1}`,
            )
          : null,
        el("span", { class: "tile-line" }, seconds((turn.generate_s || 0) + (turn.step_s || 0))),
        advantage === null
          ? null
          : el("span", {
              class: "tile-bar",
              title: `advantage ${number(advantage)}`,
              style: {
                "background-color": `color-mix(in srgb, ${advantage > 0 ? "var(--plus)" : "var(--minus)"} ${Math.round((Math.abs(advantage) / top) * 100)}%, transparent)`,
              },
            }),
      );
      item.addEventListener("click", () => showTurn(i, side));
      return item;
    }),
  );
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
  return el(
    "details",
    { class: "tools" },
    el(
      "summary",
      {},
      `${counted(names.length, "tool")}: `,
      el("span", { class: "mono" }, shown(names.join(", "))),
    ),
    own
      .flatMap((index) => data.tools[index])
      .map((tool) => el("pre", { class: "text" }, shown(JSON.stringify(tool, null, 1)))),
  );
}

function turnCard(view, member, turn, i, lanes, states, side) {
  const place = lanes.places[i];
  const card = el("article", {
    class: "turn item",
    tabindex: "-1",
    data: { turn: i },
    "aria-label": `turn ${i + 1}`,
  });
  const head = el(
    "div",
    { class: "turn-head" },
    el("b", {}, `turn ${i + 1}`),
    place.startsContext
      ? el(
          "span",
          { class: "badge context" },
          i === 0 ? "context" : `new context${place.from === null ? "" : `, off turn ${place.from + 1}`}`,
        )
      : null,
    place.isBranch ? el("span", { class: "badge context" }, `continues turn ${place.from + 1}`) : null,
    turn.is_greedy ? el("span", { class: "badge" }, "greedy") : null,
    turn.is_untrained ? el("span", { class: "badge filtered" }, "not trained on") : null,
    el(
      "span",
      { class: "muted small" },
      `+${number(turn.prompt_ids.length)} prompt, +${number(turn.response_ids.length)} sampled`,
    ),
  );
  const body = el(
    "div",
    { class: "turn-body" },
    promptPart(view, turn, i),
    responsePart(view, turn, i, side),
    outcomePart(turn, states),
    spansPart(member, i),
  );
  append(card, [
    lanes.count > 1 ? laneGutter(lanes, member.turns, i) : null,
    el("div", { class: "turn-content" }, head, body),
  ]);
  if (lanes.count > 1) card.classList.add("with-lanes");
  return card;
}

// How the cells of a prompt or a response are made so that the first difference is among them, and marked.
function marked(part, view, i, paint = () => {}) {
  const difference = view.difference;
  const isHere = difference && difference.turn === i && difference.part === part;
  const place = isHere ? difference.t : -1;
  return {
    className: part === "response" ? "sampled" : part,
    atLeast: Math.max(place, 0),
    paint: (t, cell) => {
      paint(t, cell);
      if (t === place) cell.classList.add("first-difference");
    },
  };
}

function promptPart(view, turn, i) {
  if (choices.prompts === "hidden") return null;
  if (choices.prompts === "tokens")
    return el(
      "div",
      { class: "message role-prompt" },
      el("span", { class: "role" }, "prompt"),
      el("div", { class: "body" }, tokenCells(turn.prompt_ids, view.data, marked("prompt", view, i))),
    );
  if (turn.messages) return turn.messages.slice(0, -1).map(messageBlock);
  const text = turn.prompt_text || turn.observation || "";
  return text ? messageBlock({ role: turn.prompt_text ? "prompt" : "user", content: text }) : null;
}

function responsePart(view, turn, i, side) {
  const cells = tokenCells(turn.response_ids, view.data, {
    ...marked("response", view, i, view.paint(turn)),
    place: { turn, turnIndex: i, side },
  });
  const reply = turn.messages ? turn.messages[turn.messages.length - 1] : null;
  const calls = reply
    ? [
        ...(reply.tool_calls || []).map(callBlock),
        ...(reply.call_errors || []).map((fault) => el("div", { class: "call fault" }, shown(String(fault)))),
      ]
    : [];
  return el(
    "div",
    { class: "message role-assistant" },
    el("span", { class: "role" }, "assistant"),
    el(
      "div",
      { class: "body" },
      turn.response_ids.length ? cells : null,
      turn.response_ids.length && view.data.texts ? null : textBlock(turn.text || ""),
      calls.length ? el("div", { class: "calls" }, calls) : null,
    ),
  );
}

function outcomePart(turn, states) {
  const facts = [];
  if (turn.action !== undefined)
    facts.push(el("span", {}, "action ", el("b", { class: "mono" }, shown(valueText(turn.action)))));
  facts.push(el("span", { class: turn.reward ? "strong" : "" }, `reward ${number(turn.reward || 0)}`));
  const advantage = meanAdvantage(turn);
  if (advantage !== null) facts.push(el("span", {}, `advantage ${number(advantage)}`));
  for (const [name, value] of Object.entries(turn.metrics || {}))
    facts.push(el("span", { class: "muted" }, shown(`${name} ${number(value)}`)));
  const state = stateText(turn.state_key);
  if (state && state !== turn.observation)
    facts.push(
      el(
        "span",
        { class: "muted", title: plain(state) },
        "state ",
        el("span", { class: "mono" }, shown(short(state, 40))),
        ` (${counted(states.get(state) || 1, "turn")} of the group)`,
      ),
    );
  if (turn.finish_reason && turn.finish_reason !== "stop")
    facts.push(el("span", { class: "badge truncated" }, `finish ${turn.finish_reason}`));
  const sampling = Object.entries(turn.sampling || {})
    .filter(([name]) => name !== "max_new_tokens")
    .map(([name, value]) => `${name} ${valueText(value)}`);
  if (sampling.length) facts.push(el("span", { class: "muted" }, shown(sampling.join(", "))));
  facts.push(
    el(
      "span",
      { class: "muted" },
      `sampled in ${seconds(turn.generate_s)}${turn.step_s ? `, step ${seconds(turn.step_s)}` : ""}`,
    ),
  );
  return el("div", { class: "outcome" }, facts);
}
