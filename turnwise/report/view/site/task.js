// The page of a task: the row or seed, the true answer, and what each reward gave each sibling.
"use strict";

const ANSWER_KEYS = ["answer", "ground_truth", "solution", "target", "label", "reward_model"];

turnwise.pages.task = async (parts) => {
  const [run, kind, step, index] = parts;
  const data = await stepData(run, kind, step);
  const group = data.groups.find((one) => one.index === index);
  if (!group) return el("p", { class: "empty" }, `There is no group ${index} in ${stepTitle(kind, step)}.`);
  const members = group.members;
  const scores = siblings(group).map((member) => member.score);
  return el(
    "section",
    {},
    el(
      "div",
      { class: "page-head" },
      el("h1", {}, shown(group.task.id || `group ${index}`)),
      groupPager(parts, data),
      el(
        "dl",
        { class: "facts" },
        [
          ["siblings", siblings(group).length],
          ["mean score", number(mean(scores))],
          ["variance", number(deviation(scores) ** 2)],
          ["trained on", group.rejected ? `no, ${group.rejected}` : kindIsTrained(kind) ? "yes" : "no"],
        ].map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))),
      ),
    ),
    group.rejected ? el("p", { class: "note" }, `${group.rejected}: ${REASONS[group.rejected]}`) : null,
    el(
      "div",
      { class: "panel" },
      el(
        "div",
        { class: "panel-head" },
        el("h2", {}, "Siblings"),
        el("span", { class: "muted small" }, "Enter opens one; b on its page sets it beside another"),
      ),
      el("div", { class: "scroll" }, siblingTable(parts, group, members)),
    ),
    el(
      "div",
      { class: "panel" },
      el("h2", {}, group.task.row === undefined ? "Task" : `Row ${group.task.row + 1}`),
      taskTable(group.task),
    ),
    elsewherePart(parts, group.task.id),
  );
};

function groupPager(parts, data) {
  const [run, kind, step, index] = parts;
  const indexes = data.groups.map((group) => group.index);
  const at = indexes.indexOf(index);
  return el(
    "div",
    { class: "pager" },
    at > 0 ? link([run, kind, step, indexes[at - 1]], `← group ${indexes[at - 1]}`) : null,
    at < indexes.length - 1 ? link([run, kind, step, indexes[at + 1]], `group ${indexes[at + 1]} →`) : null,
  );
}

// Rewards by name: what each gave (`reward/NAME` in the metrics), and its weight in the score.
function rewardsOf(members) {
  const names = new Set();
  for (const member of members) for (const name of Object.keys(member.outcome_rewards || {})) names.add(name);
  return [...names];
}

function rawReward(member, name) {
  const raw = (member.metrics || {})[`reward/${name}`];
  return raw === undefined ? (member.outcome_rewards || {})[name] : raw;
}

function rewardWeight(members, name, about) {
  if (about.reward_weights && name in about.reward_weights) return about.reward_weights[name];
  for (const member of members) {
    const raw = rawReward(member, name);
    const given = (member.outcome_rewards || {})[name];
    if (raw && given !== undefined) return given / raw;
  }
  return null;
}

function siblingTable(parts, group, members) {
  const about = turnwise.runs[parts[0]].about;
  const rewards = rewardsOf(members);
  const weights = rewards.map((name) => rewardWeight(members, name, about));
  const metrics = [...new Set(members.flatMap((member) => Object.keys(member.metrics || {})))]
    .filter((name) => !name.startsWith("reward/"))
    .slice(0, 8);
  const hasTurnRewards = members.some((member) => member.turns.some((turn) => turn.reward));
  const names = [
    "sibling",
    "#score",
    ...(hasTurnRewards || !rewards.length ? ["#rewards of turns"] : []),
    ...rewards.map((name, place) =>
      weights[place] === null ? `#${name}` : `#${name} × ${number(weights[place])}`,
    ),
    "ended",
    "#turns",
    "#tokens",
    ...metrics.map((name) => `#${name}`),
  ];
  return el(
    "table",
    { class: "list" },
    head(names),
    el(
      "tbody",
      { class: "rows" },
      members.map((member, place) => {
        const own = [...parts, place];
        const turnRewards = member.turns.reduce((sum, turn) => sum + (turn.reward || 0), 0);
        return [
          el(
            "tr",
            { data: { href: linkTo(...own) } },
            el(
              "td",
              {},
              link(
                own,
                member.is_baseline
                  ? `${member.sibling} (greedy baseline)`
                  : member.role && member.role !== "agent"
                    ? `${member.sibling}, ${member.role}`
                    : member.sibling,
              ),
            ),
            el("td", { class: "num strong" }, number(member.score)),
            hasTurnRewards || !rewards.length ? el("td", { class: "num" }, number(turnRewards)) : null,
            rewards.map((name) => el("td", { class: "num" }, number(rawReward(member, name)))),
            el(
              "td",
              {},
              statusBadge(member.status),
              member.limit ? el("span", { class: "muted small" }, ` by ${member.limit}`) : null,
            ),
            el("td", { class: "num" }, member.turns.length),
            el("td", { class: "num" }, number(tokensOf(member))),
            metrics.map((name) => el("td", { class: "num" }, number((member.metrics || {})[name]))),
          ),
          Object.entries(member.comments || {}).map(([name, text]) =>
            el(
              "tr",
              { class: "comment" },
              el("td", { colspan: names.length }, el("b", {}, shown(`${name}: `)), shown(String(text))),
            ),
          ),
          member.error
            ? el(
                "tr",
                { class: "comment" },
                el("td", { colspan: names.length, class: "error" }, shown(member.error)),
              )
            : null,
        ];
      }),
    ),
  );
}

function taskTable(task) {
  const rows = [
    ["tag", task.tag],
    ["split", task.split],
    ["seed", task.seed],
    ["epoch", task.epoch],
    ["agent", task.agent],
  ].filter(([, value]) => value !== undefined && value !== "" && value !== 0);
  const columns = Object.entries(task.payload || {});
  columns.sort(([first], [second]) => ANSWER_KEYS.includes(second) - ANSWER_KEYS.includes(first));
  return el(
    "table",
    { class: "settings" },
    el(
      "tbody",
      {},
      columns.map(([key, value]) =>
        el(
          "tr",
          { class: ANSWER_KEYS.includes(key) ? "answer" : "" },
          el(
            "td",
            { class: "mono" },
            shown(key),
            ANSWER_KEYS.includes(key) ? el("span", { class: "badge finished" }, "true answer") : null,
          ),
          el("td", {}, columnBlock(key, value)),
        ),
      ),
      rows.map(([key, value]) =>
        el(
          "tr",
          {},
          el("td", { class: "mono muted" }, key),
          el("td", { class: "mono" }, shown(valueText(value))),
        ),
      ),
    ),
  );
}

function columnBlock(key, value) {
  const isMessages =
    Array.isArray(value) &&
    value.length &&
    value.every((one) => one && typeof one === "object" && "role" in one);
  if (isMessages) return value.map(messageBlock);
  return textBlock(typeof value === "string" ? value : JSON.stringify(value, null, 1));
}

// The same task at other steps and in other runs.
function elsewherePart(parts, id) {
  const found = [];
  turnwise.runs.forEach((run, place) => {
    for (const kind of run.kinds) {
      for (const row of kind.steps) {
        if (place === parts[0] && kind.kind === parts[1] && row.step === parts[2]) continue;
        for (const group of groupsOf(row))
          if (group.task === id) found.push([place, kind.kind, row.step, group]);
      }
    }
  });
  if (!found.length) return null;
  const scores = found.flatMap(([, , , group]) => siblings(group).map((member) => member.score));
  const low = Math.min(...scores, 0);
  const high = Math.max(...scores, low + 1e-9);
  return el(
    "div",
    { class: "panel" },
    el("h2", {}, "The same task elsewhere"),
    el(
      "table",
      { class: "list" },
      el(
        "tbody",
        { class: "rows" },
        found
          .slice(0, 200)
          .map(([run, kind, step, group]) => elsewhereRow([run, kind, step, group.index], group, low, high)),
      ),
    ),
  );
}

function elsewhereRow(parts, group, low, high) {
  const members = siblings(group);
  const scores = members.map((member) => member.score);
  return el(
    "tr",
    { data: { href: linkTo(...parts) } },
    el("td", {}, turnwise.runs.length > 1 ? shown(turnwise.runs[parts[0]].name) : ""),
    el("td", {}, link(parts, stepTitle(parts[1], parts[2]))),
    el("td", {}, scoreDots(scores, low, high, { names: members.map(siblingName) })),
    el("td", { class: "num" }, number(mean(scores))),
  );
}
