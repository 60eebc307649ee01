// Unit by unit, one side against the other.
"use strict";

const METRICS = { compute: ["Compute", "time", "compute"], exposed: ["Exposed transfer", "time", "transfer"], bytes: ["Bytes", "bytes", "accent"] };

function drawUnits() {
  const two = sides.length > 1;
  const found = section("units", two ? `${data.kind === "run" ? capital(sides[0].label) : sides[0].label} against ${sides[1].label}, by unit` : "By unit", two
    ? "What each unit computes, how long compute waits for its collectives, and the bytes these move."
    : data.kind === "run" && sides.length ? "This run has no prediction to compare with: profile a run whose plan is known, and it is simulated." : null);
  if (!data.units.length) return endWith(found, unprofiled("No units to compare", "measures them and predicts the same plan"));
  const body = el("div", {});
  const choose = metric => { state.metric = metric; fillUnits(body); tabs.forEach(([name, tab]) => tab.setAttribute("aria-pressed", String(name === metric))); };
  const tabs = Object.entries(METRICS).map(([name, [title]]) => [name, el("button", { type: "button", "aria-pressed": String(name === state.metric), onclick: () => choose(name) }, title)]);
  found.append(el("div", { class: "row", style: "margin-bottom: .6rem" }, tabs.map(([, tab]) => tab)), body);
  fillUnits(body);
  return found;
}

function fillUnits(body) {
  const [, as, role] = METRICS[state.metric];
  const late = data.kind === "run" ? 0 : 1;  // measured less predicted, or the second run less the first
  const pointer = (index, unit) => `${pointerOf(index)}/units/${escaped(unit)}/${state.metric}`;
  const values = data.units.map(unit => sides.map((_, index) => at(pointer(index, unit)) ?? null));
  const most = Math.max(1, ...values.flat().filter(value => value !== null));
  if (values.flat().every(value => value === null)) {
    body.replaceChildren(unprofiled("Bytes are not known of this run", "writes messages.json"));
    return;
  }
  const heads = [el("th", {}, "unit"), el("th", { class: "dots" }, el("span", { class: "legend", style: "margin: 0" },
    sides.map((side, index) => key(role, side.label, index ? "ring" : "dot")))), ...sides.map(side => el("th", { class: "num" }, side.label))];
  if (sides.length > 1) heads.push(el("th", { class: "num apart" }, "difference"));
  const rows = data.units.map((unit, i) => {
    const positions = values[i].map(value => value === null ? null : 100 * value / most);
    const known = positions.filter(position => position !== null);
    const line = known.length > 1 ? el("s", { style: `left: ${Math.min(...known)}%; width: ${Math.max(...known) - Math.min(...known)}%` }) : null;
    const dots = positions.map((position, index) => position === null ? null : el("i", { class: index ? "second" : "first", style: `left: ${position}%; --dot: var(--${role})` })).reverse();
    const cells = sides.map((_, index) => el("td", { class: "num" }, num(pointer(index, unit), as)));
    if (sides.length > 1) cells.push(el("td", { class: "num apart" }, values[i].includes(null) ? "–" : num(pointer(late, unit), as, { less: pointer(1 - late, unit) })));
    return el("tr", {}, el("td", { class: "unit" }, unit || "root"), el("td", { class: "dots" }, el("div", { style: "margin: 0 .4rem" }, line, dots)), cells);
  });
  body.replaceChildren(el("div", { class: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, heads)), el("tbody", {}, rows))));
}
