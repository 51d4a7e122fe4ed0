// Texts of models and environments, shown as they are: what can't be seen is named, and nothing can change the
// direction or the look of what stands around it.
"use strict";

const NAMED = {
  "\u00a0": "nbsp",
  "\u00ad": "shy",
  "\u200b": "zwsp",
  "\u200c": "zwnj",
  "\u200d": "zwj",
  "\u2060": "wj",
  "\ufeff": "bom",
  "\u202a": "lre",
  "\u202b": "rle",
  "\u202c": "pdf",
  "\u202d": "lro",
  "\u202e": "rlo",
  "\u2066": "lri",
  "\u2067": "rli",
  "\u2068": "fsi",
  "\u2069": "pdi",
  "\u200e": "lrm",
  "\u200f": "rlm",
  "\u061c": "alm",
  "\u2028": "ls",
  "\u2029": "ps",
  "\r": "cr",
  "\u001b": "esc",
  "\u0000": "nul",
};
const HIDDEN =
  /[\u0000-\u0008\u000b-\u001f\u007f-\u00a0\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffc\ufffe\uffff\ud800-\udfff\u{e0000}-\u{e007f}]/u;

function hiddenName(character) {
  const code = character.codePointAt(0).toString(16).toUpperCase().padStart(4, "0");
  return NAMED[character] || `U+${code}`;
}

// The text as nodes. Characters that can't be seen become small labels.
function shown(text) {
  const nodes = [];
  let plain = "";
  for (const character of String(text)) {
    if (!HIDDEN.test(character)) {
      plain += character;
      continue;
    }
    if (plain) nodes.push(plain);
    plain = "";
    nodes.push(
      el(
        "span",
        { class: "hidden-char", title: `U+${character.codePointAt(0).toString(16).toUpperCase()}` },
        hiddenName(character),
      ),
    );
  }
  if (plain) nodes.push(plain);
  return nodes;
}

// The same as one text, for tips and titles, which hold no elements.
function plain(text) {
  return [...String(text)]
    .map((character) => (HIDDEN.test(character) ? `⟨${hiddenName(character)}⟩` : character))
    .join("");
}

const FOLDED_LINES = 14;
const FOLDED_CHARACTERS = 1600;

// A block of text. A long one is folded, and opens by a click.
function textBlock(text, className = "") {
  const lines = text.split("\n");
  const isLong = lines.length > FOLDED_LINES || text.length > FOLDED_CHARACTERS;
  const block = el("div", { class: `text ${className}` }, shown(text));
  if (!isLong) return block;
  block.classList.add("folded");
  const size = `${counted(lines.length, "line")}, ${counted(text.length, "character")}`;
  const button = el(
    "button",
    { class: "unfold", type: "button", "aria-expanded": "false" },
    `show all ${size}`,
  );
  button.addEventListener("click", () => {
    const isFolded = block.classList.toggle("folded");
    button.setAttribute("aria-expanded", String(!isFolded));
    button.textContent = isFolded ? `show all ${size}` : "fold";
  });
  return el("div", { class: "foldable" }, block, button);
}

function contentText(content) {
  if (content === null || content === undefined) return "";
  if (typeof content === "string") return content;
  if (!Array.isArray(content)) return JSON.stringify(content);
  return content.map((part) => (typeof part.text === "string" ? part.text : `[${part.type}]`)).join("\n");
}

// One message as the model saw it.
function messageBlock(message) {
  const role = String(message.role || "?");
  const parts = [];
  const text = contentText(message.content);
  if (message.reasoning_content) parts.push(textBlock(String(message.reasoning_content), "thinking"));
  if (text) parts.push(textBlock(text));
  for (const call of message.tool_calls || []) parts.push(callBlock(call));
  for (const fault of message.call_errors || [])
    parts.push(el("div", { class: "call fault" }, shown(String(fault))));
  return el(
    "div",
    { class: `message role-${/^[a-z]+$/.test(role) ? role : "other"}` },
    el("span", { class: "role" }, shown(role)),
    el("div", { class: "body" }, parts),
  );
}

function callBlock(call) {
  const named = call.function || call;
  const written =
    typeof named.arguments === "string" ? named.arguments : JSON.stringify(named.arguments, null, 1);
  return el(
    "div",
    { class: "call" },
    el("b", {}, shown(String(named.name))),
    el("span", { class: "arguments" }, shown(`(${written || ""})`)),
  );
}

// A value of a row, a state or a setting.
function valueText(value) {
  return typeof value === "string" ? value : JSON.stringify(value);
}

function stateText(key) {
  if (key === null || key === undefined) return "";
  if (typeof key === "object" && "object" in key) return `#${key.object} ${key.text}`;
  return valueText(key);
}

function short(text, length = 60) {
  const line = text.replace(/\s+/g, " ");
  return line.length > length ? `${line.slice(0, length - 1)}…` : line;
}

// The end of a text: keys of states mostly begin alike.
function ending(text, length) {
  return text.length > length ? `…${text.slice(1 - length)}` : text;
}

async function copy(text, button) {
  const area = el("textarea", { class: "copy-area" });
  area.value = text;
  document.body.append(area);
  area.select();
  const isDone = document.execCommand("copy");
  area.remove();
  turnwise.copied = text;
  notify(isDone ? "copied" : "the browser refuses to copy");
  if (button) button.focus();
}

function notify(text) {
  const box = el("div", { class: "notice", role: "status" }, text);
  document.body.append(box);
  setTimeout(() => box.remove(), 2500);
}
