// The page of a step: its groups as rows, and its failed episodes with their errors.
"use strict";

const REASONS = {
  failed: "an episode failed for good, so the group was replaced",
  filtered: "group_filter dropped it: nothing was trained on it",
  stale: "older than async_generation_ratio allows",
};

turnwise.pages.step = async (parts) => {
  const [run, kind, step] = parts;
  const data = await stepData(run, kind, step);
  const groups = data.groups;
  const members = groups.flatMap(siblings);
  const scores = members.map((member) => member.score);
  const low = Math.min(...scores, 0);
  const high = Math.max(...scores, low + 1e-9);
  const failed = groups
    .flatMap((group) => group.members.map((member, place) => [group, member, place]))
    .filter(([, member]) => member.status === "failed");
  const filter = el(
    "select",
    { "aria-label": "groups" },
    ["all groups", "trained on", "not trained on", "with different scores"].map((name) =>
      el("option", {}, name),
    ),
  );
  const body = el("tbody", { class: "rows" });
  const fill = () =>
    replaceChildren(
      body,
      groups.filter((group) => fits(group, filter.value)).map((group) => groupRow(parts, group, low, high)),
    );
  filter.addEventListener("change", fill);
  fill();
  const good = members.filter((member) => member.status !== "failed");
  const successes = good.map(successOf).filter((success) => success !== undefined);
  const success = `${Math.round(mean(successes.map(Number)) * 100)}%`;
  return el(
    "section",
    {},
    stepHead(parts, [
      ["groups", groups.length],
      ["episodes", members.length],
      ["mean score", meanText(good.map((member) => member.score))],
      ...(successes.length ? [["success", success]] : []),
      ["sampled tokens", number(sum(groups.flatMap((group) => group.members.map(tokensOf))))],
    ]),
    sentencesAt(run, kind, step),
    data.damaged
      ? el("p", { class: "note" }, `${counted(data.damaged, "line")} of this step can't be read`)
      : null,
    failed.length ? failedPart(parts, failed) : null,
    el(
      "div",
      { class: "panel" },
      el("div", { class: "panel-head" }, el("h2", {}, "Groups"), filter),
      el(
        "div",
        { class: "scroll" },
        el(
          "table",
          { class: "list" },
          head([
            "group",
            "task",
            "scores of siblings",
            "#mean",
            "#variance",
            "#turns",
            "#tokens",
            "trained on",
          ]),
          body,
        ),
      ),
    ),
  );
};

function fits(group, choice) {
  if (choice === "trained on") return !group.rejected;
  if (choice === "not trained on") return Boolean(group.rejected);
  if (choice === "with different scores")
    return deviation(siblings(group).map((member) => member.score)) > 1e-6;
  return true;
}

function siblings(group) {
  return group.members.filter((member) => !member.is_baseline);
}

function tokensOf(member) {
  return member.turns.reduce((sum, turn) => sum + turn.response_ids.length, 0);
}

function stepHead(parts, facts) {
  const [run, kind, step] = parts;
  const steps = kindOf(run, kind).steps.map((row) => row.step);
  const at = steps.indexOf(step);
  return el(
    "div",
    { class: "page-head" },
    el("h1", {}, stepTitle(kind, step)),
    el(
      "div",
      { class: "pager" },
      at > 0
        ? link([run, kind, steps[at - 1]], `← ${steps[at - 1]}`)
        : el("span", { class: "muted" }, "first"),
      at < steps.length - 1
        ? link([run, kind, steps[at + 1]], `${steps[at + 1]} →`)
        : el("span", { class: "muted" }, "last"),
    ),
    el(
      "dl",
      { class: "facts" },
      facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))),
    ),
  );
}

function sentencesAt(run, kind, step) {
  if (kind === "val") return null;
  const sentences = (turnwise.runs[run].about.health || []).filter((sentence) => sentence.step === step);
  return sentences.length ? healthPart(sentences) : null;
}

function failedPart(parts, failed) {
  return el(
    "div",
    { class: "panel failures" },
    el("h2", {}, `${counted(failed.length, "episode")} failed`),
    failed
      .slice(0, 20)
      .map(([group, member, place]) =>
        el(
          "div",
          { class: "failure" },
          link([...parts, group.index, place], `group ${group.index}, ${siblingName(member)}`),
          el("pre", { class: "error" }, shown(member.error || "")),
        ),
      ),
    failed.length > 20
      ? el("p", { class: "muted" }, `and ${failed.length - 20} more: search status:failed`)
      : null,
  );
}

function groupRow(parts, group, low, high) {
  const own = [...parts, group.index];
  const members = siblings(group);
  const scores = members.map((member) => member.score);
  const variance = deviation(scores) ** 2;
  const lengths = members.map(tokensOf);
  const turns = members.map((member) => member.turns.length);
  const links = members.map((member) => linkTo(...own, group.members.indexOf(member)));
  return el(
    "tr",
    { data: { href: linkTo(...own) }, class: group.rejected ? "rejected" : "" },
    el("td", {}, link(own, group.index)),
    el(
      "td",
      {},
      el("span", { class: "mono" }, shown(group.task.id || "")),
      " ",
      el("span", { class: "muted small" }, shown(short(taskWords(group), 70))),
    ),
    el(
      "td",
      {},
      scoreDots(scores, low, high, {
        links,
        names: members.map(siblingName),
        failed: members.map((member) => member.status === "failed"),
      }),
    ),
    el("td", { class: "num" }, number(mean(scores))),
    el("td", { class: `num${variance < 1e-12 ? " muted" : ""}` }, number(variance)),
    el("td", { class: "num" }, range(turns)),
    el("td", { class: "num" }, range(lengths)),
    el(
      "td",
      {},
      group.rejected
        ? el("span", { class: `badge ${group.rejected}`, title: REASONS[group.rejected] }, group.rejected)
        : el("span", { class: "muted" }, kindIsTrained(parts[1]) ? "yes" : "–"),
      group.length && group.length > group.members.length
        ? el(
            "span",
            { class: "badge failed", title: "the file was cut here" },
            `${group.length - group.members.length} missing`,
          )
        : null,
    ),
  );
}

function kindIsTrained(kind) {
  return kind === "train";
}

function range(values) {
  const low = Math.min(...values);
  const high = Math.max(...values);
  return low === high ? number(low) : `${number(low)}–${number(high)}`;
}

// What the task asks: the row's prompt, or what the environment shows first.
function taskWords(group) {
  const payload = group.task.payload || {};
  for (const key of ["prompt", "question", "problem"]) {
    const value = payload[key];
    if (typeof value === "string") return value;
    if (Array.isArray(value) && value.length) return contentText(value[value.length - 1].content);
  }
  const first = group.members.find((member) => member.turns.length);
  return first ? first.turns[0].observation || "" : "";
}
