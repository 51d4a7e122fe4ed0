// The search over all steps: words, and conditions on task, tag, score, length, turns, status.
"use strict";

const CONDITION = /^(task|tag|score|length|turns|status|step):(<=|>=|<|>|=)?(.+)$/;
const SEARCH_HELP =
  "words · task:ID · tag:NAME · score:>0.5 · length:>100 · turns:3 · status:failed|truncated|filtered|stale · step:<9";

function readQuery(text) {
  const query = { words: [], conditions: [] };
  for (const part of text.match(/(?:[a-z]+:)?"[^"]*"|\S+/g) || []) {
    const match = CONDITION.exec(part);
    if (match)
      query.conditions.push({ field: match[1], sign: match[2] || "", value: match[3].replace(/^"|"$/g, "") });
    else query.words.push(part.replace(/^"|"$/g, "").toLowerCase());
  }
  return query;
}

function meets(condition, episode) {
  const { field, sign, value } = condition;
  if (field === "task") return episode.task.toLowerCase().includes(value.toLowerCase());
  if (field === "tag") return episode.tag.toLowerCase() === value.toLowerCase();
  if (field === "status") return episode.status === value || episode.rejected === value;
  const limit = Number(value);
  const actual = episode[field];
  if (Number.isNaN(limit)) return false;
  if (sign === "<") return actual < limit;
  if (sign === ">") return actual > limit;
  if (sign === "<=") return actual <= limit;
  if (sign === ">=") return actual >= limit;
  return Math.abs(actual - limit) < 1e-9;
}

// All episodes of the index, in order.
function* episodesOf(run, kind) {
  for (const row of kind.steps) {
    for (const group of groupsOf(row)) {
      for (let place = 0; place < group.size; place += 1) {
        const at = group.start + place;
        yield {
          run,
          kind: kind.kind,
          step: row.step,
          group: group.index,
          member: place,
          name: siblingName(group.members[place]),
          task: group.task,
          tag: group.tag,
          rejected: group.rejected,
          score: row.score[at],
          length: row.tokens[at],
          turns: row.turns[at],
          status: STATUSES[row.status[at]] || "",
        };
      }
    }
  }
}

function membersText(member) {
  const texts = [];
  for (const turn of member.turns) {
    texts.push(turn.text || "", turn.observation || "", turn.prompt_text || "");
    for (const message of turn.messages || []) texts.push(contentText(message.content));
  }
  if (member.error) texts.push(member.error);
  return texts.join("\n").toLowerCase();
}

const MAX_FOUND = 300;

// Calls `onFound` with each episode that fits, and `onStep` after each step that was read for words. Ends when
// `isStale()`.
async function search(text, { onFound, onStep, isStale }) {
  const query = readQuery(text);
  let found = 0;
  for (let run = 0; run < turnwise.runs.length; run += 1) {
    for (const kind of turnwise.runs[run].kinds) {
      let newest = null;
      for (const episode of episodesOf(run, kind)) {
        if (!query.conditions.every((condition) => meets(condition, episode))) continue;
        if (query.words.length) {
          if (newest !== episode.step) {
            onStep(episode.step);
            newest = episode.step;
          }
          const data = await stepData(run, kind.kind, episode.step);
          if (isStale()) return found;
          const member = data.groups.find(
            (group) => group.index === episode.group && (group.task.id || "") === episode.task,
          ).members[episode.member];
          const body = membersText(member);
          if (!query.words.every((word) => body.includes(word))) continue;
          episode.excerpt = excerpt(body, query.words[0]);
        }
        found += 1;
        onFound(episode);
        if (found >= MAX_FOUND) return found;
      }
    }
  }
  return found;
}

function excerpt(text, word) {
  const at = text.indexOf(word);
  return short(text.slice(Math.max(0, at - 40), at + word.length + 60), 110);
}

let newestSearch = 0;

turnwise.pages.search = (parts, query) => {
  const text = query.get("q") || "";
  newestSearch += 1;
  const number_ = newestSearch;
  const state = el("p", { class: "muted" }, text ? "searching…" : SEARCH_HELP);
  const body = el("tbody", { class: "rows" });
  const table = el(
    "table",
    { class: "list" },
    head(["step", "group", "sibling", "task", "#score", "#turns", "#tokens", "status", ""]),
    body,
  );
  if (text) {
    const isStale = () => number_ !== newestSearch;
    let count = 0;
    search(text, {
      isStale,
      onStep: (step) => {
        state.textContent = `searching… step ${step}, ${counted(count, "episode")} so far`;
      },
      onFound: (episode) => {
        count += 1;
        append(body, [foundRow(episode)]);
      },
    }).then(
      (found) => {
        if (!isStale())
          state.textContent = `${counted(found, "episode")}${found >= MAX_FOUND ? `, the first ${MAX_FOUND}; add a condition` : ""}`;
      },
      (fault) => {
        state.textContent = fault.message;
      },
    );
  }
  return el(
    "section",
    {},
    el("h1", {}, "Search"),
    el("p", { class: "muted small" }, SEARCH_HELP),
    state,
    el("div", { class: "panel scroll" }, table),
  );
};

function foundRow(episode) {
  const parts = [episode.run, episode.kind, episode.step, episode.group, episode.member];
  const name = turnwise.runs.length > 1 ? `${turnwise.runs[episode.run].name} · ` : "";
  return el(
    "tr",
    { data: { href: linkTo(...parts) } },
    el(
      "td",
      {},
      link(parts.slice(0, 3), `${name}${episode.kind === "train" ? "" : `${episode.kind} `}${episode.step}`),
    ),
    el("td", {}, link(parts.slice(0, 4), episode.group)),
    el("td", {}, link(parts, episode.name.replace(/^sibling /, ""))),
    el("td", { class: "mono" }, shown(episode.task)),
    el("td", { class: "num" }, number(episode.score)),
    el("td", { class: "num" }, episode.turns),
    el("td", { class: "num" }, number(episode.length)),
    el("td", {}, statusBadge(episode.rejected || episode.status)),
    el("td", { class: "muted small excerpt" }, episode.excerpt ? shown(episode.excerpt) : ""),
  );
}

function statusBadge(status) {
  return status ? el("span", { class: `badge ${status}` }, status) : "";
}
