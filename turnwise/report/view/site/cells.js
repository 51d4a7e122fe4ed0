// Sampled tokens as cells: their text, and a colour for a value of each.
"use strict";

// What can be shown of a token, and how it is coloured. `of` returns the value of token t of a turn, or null.
const VALUES = {
  none: { title: "no colour", of: () => null },
  logprob: { title: "log-prob (sampler)", scale: "low", of: (turn, t) => at(turn.logprobs, t) },
  old: { title: "log-prob (trainer)", scale: "low", key: "old", of: (turn, t) => at(turn.old, t) },
  difference: {
    title: "trainer − sampler",
    scale: "both",
    key: "old",
    of: (turn, t) => minus(at(turn.old, t), at(turn.logprobs, t)),
  },
  ref: { title: "log-prob (reference)", scale: "low", key: "ref", of: (turn, t) => at(turn.ref, t) },
  drift: {
    title: "policy − reference",
    scale: "both",
    key: "ref",
    of: (turn, t) => minus(turn.old ? at(turn.old, t) : at(turn.logprobs, t), at(turn.ref, t)),
  },
  entropy: { title: "entropy", scale: "high", key: "entropy", of: (turn, t) => at(turn.entropy, t) },
  advantage: {
    title: "advantage",
    scale: "both",
    of: (turn, t) => (Array.isArray(turn.advantage) ? at(turn.advantage, t) : turn.advantage),
  },
  mask: { title: "loss mask", scale: "flag", of: (turn) => Number(turn.isTrained) },
  version: { title: "weight version", scale: "kind", of: (turn, t) => versionOf(turn, t) },
  kept: { title: "kept ids", scale: "high", of: (turn, t) => at(turn.kept, t) },
};

function at(values, t) {
  return values && t < values.length ? values[t] : null;
}

function minus(first, second) {
  return first === null || second === null ? null : first - second;
}

function versionOf(turn, t) {
  let end = 0;
  for (const [version, count] of turn.versions || []) {
    end += count;
    if (t < end) return version;
  }
  return null;
}

// Why a value has no colour here, or "" if it has some.
function lacking(name, members) {
  const value = VALUES[name];
  const isIn = (one) => (name === "mask" ? one === 1 : isKnown(one));
  const has = members.some((member) =>
    member.turns.some((turn) => turn.response_ids.some((_, t) => isIn(value.of(turn, t)))),
  );
  if (has || name === "none") return "";
  if (value.key) return `record_token_values: [${value.key}] records it`;
  if (name === "advantage" || name === "mask") return "nothing was trained on this";
  if (name === "kept") return "sampled from the whole vocabulary; top_k keeps ids";
  return "not in this file";
}

function isKnown(value) {
  return value !== null && value !== undefined && !Number.isNaN(value);
}

// The largest size of a value over these members, for the scale.
function scaleOf(name, members) {
  const value = VALUES[name];
  let top = 0;
  const kinds = new Set();
  for (const member of members) {
    for (const turn of member.turns) {
      for (let t = 0; t < turn.response_ids.length; t += 1) {
        const one = value.of(turn, t);
        if (!isKnown(one)) continue;
        if (value.scale === "kind") kinds.add(one);
        else top = Math.max(top, Math.abs(one));
      }
    }
  }
  if (value.scale === "low") top = Math.min(top, 6);
  return { top: top || 1, kinds: [...kinds].sort((a, b) => a - b) };
}

function colorOf(name, value, scale) {
  if (!isKnown(value)) return "";
  const kind = VALUES[name].scale;
  const mixed = (color, share) =>
    `color-mix(in srgb, ${color} ${Math.round(Math.min(Math.max(share, 0), 1) * 78)}%, transparent)`;
  if (kind === "low") return mixed("var(--hot)", Math.min(-value, scale.top) / scale.top);
  if (kind === "high") return mixed("var(--cool)", value / scale.top);
  if (kind === "flag") return value ? mixed("var(--good)", 0.5) : "";
  if (kind === "kind") return mixed(`var(--c${(scale.kinds.indexOf(value) % 8) + 1})`, 0.5);
  if (kind === "both") return mixed(value > 0 ? "var(--plus)" : "var(--minus)", Math.abs(value) / scale.top);
  return "";
}

function scaleLegend(name, scale) {
  const value = VALUES[name];
  const ramp = (from, to) =>
    el(
      "span",
      { class: "ramp" },
      [0, 0.25, 0.5, 0.75, 1].map((share) =>
        el("span", { style: { "background-color": colorOf(name, from + (to - from) * share, scale) } }),
      ),
    );
  if (value.scale === "low")
    return el("span", { class: "scale" }, "0", ramp(0, -scale.top), `≤ −${number(scale.top)}`);
  if (value.scale === "high")
    return el("span", { class: "scale" }, "0", ramp(0, scale.top), number(scale.top));
  if (value.scale === "both")
    return el(
      "span",
      { class: "scale" },
      `−${number(scale.top)}`,
      ramp(-scale.top, scale.top),
      `+${number(scale.top)}`,
    );
  if (value.scale === "flag")
    return el(
      "span",
      { class: "scale" },
      el("span", { class: "ramp" }, el("span", { style: { "background-color": colorOf(name, 1, scale) } })),
      "trained on",
    );
  if (value.scale === "kind")
    return el(
      "span",
      { class: "scale" },
      scale.kinds
        .slice(0, 8)
        .map((kind) => [
          el(
            "span",
            { class: "ramp" },
            el("span", { style: { "background-color": colorOf(name, kind, scale) } }),
          ),
          `version ${kind}`,
        ]),
    );
  return "";
}

// The text of a token in its cell. Blanks are seen: a dot, an arrow, a sign for the end of a line.
function tokenNodes(text) {
  const nodes = [];
  let plain = "";
  const flush = () => {
    if (plain) nodes.push(plain);
    plain = "";
  };
  for (const character of text) {
    const sign = { " ": "·", "\n": "↵", "\t": "→" }[character];
    if (sign) {
      flush();
      nodes.push(el("i", {}, sign));
      if (character === "\n") nodes.push("\n");
    } else if (HIDDEN.test(character)) {
      flush();
      nodes.push(shown(character));
    } else plain += character;
  }
  flush();
  return nodes;
}

const MAX_CELLS = 3000;

// The cells of a list of ids. `paint(t, cell)` colours one; cells know their place for the line below.
function tokenCells(ids, data, { className = "", paint = null, place = null, atLeast = 0 } = {}) {
  const special = data.specialSet || (data.specialSet = new Set(data.special || []));
  const box = el("div", { class: `cells ${className}` });
  const add = (from, to) => {
    const cells = [];
    for (let t = from; t < to; t += 1) {
      const id = ids[t];
      const text = data.texts ? data.texts[id] : null;
      const cell = el(
        "span",
        {
          class: `tok${special.has(id) ? " special" : ""}${text === null || text === undefined ? " id" : ""}`,
        },
        text === null || text === undefined ? String(id) : text === "" ? el("i", {}, "∅") : tokenNodes(text),
      );
      cell.token = { t, id, text, ...place };
      if (paint) paint(t, cell);
      cells.push(cell);
    }
    append(box, cells);
  };
  const first = Math.min(ids.length, Math.max(MAX_CELLS, atLeast + 200));
  add(0, first);
  if (ids.length > first) {
    const button = el(
      "button",
      { class: "unfold", type: "button" },
      `show ${counted(ids.length - first, "more token")}`,
    );
    button.addEventListener("click", () => {
      button.remove();
      add(first, ids.length);
    });
    append(box, [button]);
  }
  return box;
}

// What the line at the foot of the page says of the token under the pointer.
function tokenFacts(token) {
  const { turn, t, id, text } = token;
  const facts = [
    ["token", text === null || text === undefined ? "no tokenizer" : JSON.stringify(text)],
    ["id", String(id)],
  ];
  if (!turn) return [...facts, ["prompt", "not sampled: mask 0"]];
  const logprob = at(turn.logprobs, t);
  if (isKnown(logprob)) facts.push(["log-prob", number(logprob)], ["p", number(Math.exp(logprob))]);
  for (const name of ["old", "difference", "ref", "entropy", "advantage"]) {
    const value = VALUES[name].of(turn, t);
    if (isKnown(value)) facts.push([VALUES[name].title, number(value)]);
  }
  facts.push(["mask", turn.isTrained ? "1" : "0"]);
  const version = versionOf(turn, t);
  if (isKnown(version)) facts.push(["version", String(version)]);
  const kept = at(turn.kept, t);
  if (isKnown(kept)) facts.push(["kept ids", kept ? String(kept) : "all"]);
  return facts;
}
