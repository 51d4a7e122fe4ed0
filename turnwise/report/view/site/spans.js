// The spans of an episode's trace: under each turn what took time in it, drawn to one scale for the episode.
"use strict";

// The spans of turn i, or with null those of no turn (rewards of the whole episode, an error that ended it).
function spansPart(member, i) {
  const all = (member.spans || []).map(([turn, isInner, name, start, length, text, isError]) => ({
    turn,
    isInner,
    name,
    start,
    length,
    text,
    isError,
  }));
  const own = all.filter((span) => span.turn === i);
  if (!own.length) return null;
  const end = Math.max(...all.map((span) => span.start + span.length), 1e-9);
  const first = Math.min(...own.map((span) => span.start));
  const last = Math.max(...own.map((span) => span.start + span.length));
  const title = i === null ? "of no single turn" : seconds(last - first);
  return el(
    "details",
    { class: "spans-of", open: i === null || own.some((span) => span.isError) },
    el("summary", {}, `${counted(own.length, "span")}, ${title}`),
    own.map((span) => spanLine(span, end)),
  );
}

function spanLine(span, end) {
  const share = (value) => `${(100 * value) / end}%`;
  return el(
    "div",
    { class: `span-line${span.isInner ? " inner" : ""}${span.isError ? " fault" : ""}` },
    el("span", { class: "mono span-name" }, shown(span.name)),
    el(
      "span",
      { class: "span-track", title: `from ${seconds(span.start)} on` },
      el("span", { class: "span-bar", style: { left: share(span.start), width: share(span.length) } }),
    ),
    el("span", { class: "num" }, seconds(span.length)),
    el("span", { class: "muted span-text", title: plain(span.text) }, shown(short(span.text, 160))),
  );
}
