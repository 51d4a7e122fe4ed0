// Contexts and branches of an episode: which turn continues which, and the lane that each is drawn in.
"use strict";

// The turn that turn i continues, or null if it starts a context.
function parentOf(turns, i) {
  const turn = turns[i];
  if (i === 0 || turn.starts_context) return null;
  return turn.parent === undefined || turn.parent === null ? i - 1 : turn.parent;
}

// For each turn its lane, the lane it branched off, and whether a context starts there. The first turn that
// continues another stays in its lane; a second one branches into a new lane, which begins beside the turn that it
// leaves. Contexts that follow each other, as in mode `step`, share a lane.
function lanesOf(turns) {
  const children = new Map();
  turns.forEach((_, i) => {
    const parent = parentOf(turns, i);
    if (parent !== null) children.set(parent, [...(children.get(parent) || []), i]);
  });
  const places = [];
  const lastUse = [];
  const end = lastUses(turns, children);
  let count = 0;
  turns.forEach((turn, i) => {
    const parent = parentOf(turns, i);
    const isRoot = parent === null;
    const origin =
      isRoot && turn.parent !== undefined && turn.parent !== null && turn.parent < i ? turn.parent : parent;
    let lane;
    if (!isRoot && children.get(parent)[0] === i) lane = places[parent].lane;
    else if (isRoot && i > 0) {
      const free =
        origin === null
          ? lastUse.findIndex((last) => last < i)
          : lastUse[places[origin].lane] === origin
            ? places[origin].lane
            : -1;
      lane = free >= 0 ? free : count++;
    } else lane = count++;
    places.push({
      lane,
      from: origin === null ? null : origin,
      startsContext: isRoot,
      isBranch: !isRoot && children.get(parent)[0] !== i,
    });
    lastUse[lane] = Math.max(lastUse[lane] ?? -1, end[i]);
  });
  return { places, count };
}

// For each turn the last turn that its first line of descent reaches.
function lastUses(turns, children) {
  const end = turns.map((_, i) => i);
  for (let i = turns.length - 1; i >= 0; i -= 1) {
    const first = (children.get(i) || [])[0];
    if (first !== undefined) end[i] = Math.max(i, end[first]);
  }
  return end;
}

// The turns of the context that ends with turn i.
function chainOf(turns, i) {
  const chain = [i];
  for (let parent = parentOf(turns, i); parent !== null; parent = parentOf(turns, parent))
    chain.unshift(parent);
  return chain;
}

function contextCount(turns) {
  return turns.filter((_, i) => parentOf(turns, i) === null).length;
}

// The piece of the lanes' picture beside one turn: vertical lines of the lanes that pass, a dot for the turn, and
// curves to the lanes that leave here.
function laneGutter(lanes, turns, i) {
  const width = 14 * lanes.count + 10;
  const picture = svg("svg", {
    class: "gutter",
    width,
    height: 44,
    viewBox: `0 0 ${width} 44`,
    "aria-hidden": "true",
  });
  const x = (lane) => 9 + lane * 14;
  const { lane } = lanes.places[i];
  const rail = el(
    "div",
    { class: "rails" },
    railsBeside(lanes, turns, i).map(({ lane: other, form }) =>
      el("span", {
        class: `rail ${form}`,
        style: { left: `${x(other)}px`, "--lane": `var(--c${(other % 8) + 1})` },
      }),
    ),
  );
  for (const place of lanes.places) {
    if (place.from !== i || place.lane === lane) continue;
    append(picture, [
      svg("path", {
        class: "branch",
        d: `M${x(lane)} 22C${x(lane)} 36 ${x(place.lane)} 30 ${x(place.lane)} 44`,
        style: { stroke: `var(--c${(place.lane % 8) + 1})` },
      }),
    ]);
  }
  append(picture, [
    svg("circle", { cx: x(lane), cy: 22, r: 5, style: { fill: `var(--c${(lane % 8) + 1})` } }),
  ]);
  return el("div", { class: "lanes", style: { width: `${width}px` } }, rail, picture);
}

// Which lanes pass a turn's row, and in what form: `whole`, from the turn down (`starts`), down to the turn (`ends`),
// or from the curve of a branch down (`leaves`). A lane ends between two contexts.
function railsBeside(lanes, turns, i) {
  const rails = [];
  for (let lane = 0; lane < lanes.count; lane += 1) {
    for (const [above, below] of links(lanes, turns, lane)) {
      if (above < i && i < below) rails.push({ lane, form: "whole" });
      else if (above === i) rails.push({ lane, form: lanes.places[i].lane === lane ? "starts" : "leaves" });
      else if (below === i) rails.push({ lane, form: "ends" });
    }
  }
  return rails;
}

// The pairs of turns that a lane joins: a turn and the one that it continues or leaves.
function links(lanes, turns, lane) {
  const pairs = [];
  lanes.places.forEach((place, i) => {
    const isNewContext =
      place.startsContext && (place.from === null || lanes.places[place.from].lane === lane);
    if (place.lane === lane && place.from !== null && !isNewContext) pairs.push([place.from, i]);
  });
  return pairs;
}
