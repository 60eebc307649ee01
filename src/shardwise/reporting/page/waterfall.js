// Where the step went: parts that begin where the one before ends, and sum to the step.
"use strict";

function drawWaterfall() {
  const found = section("waterfall", "Where the step went",
    "Each part begins where the one above ends; together they are the step of this rank.");
  if (!sides.length) return endWith(found, unprofiled("No step was profiled", "measures one"));
  const longest = Math.max(...sides.map((side, index) => side.ranks[rankOf(index)].step));
  return endWith(found, el("div", { class: "pair" }, sides.map((side, index) => {
    const pointer = pointerOf(index), rank = side.ranks[rankOf(index)];
    let begin = 0;
    const rows = Object.entries(PARTS).flatMap(([name, role]) => {
      const value = rank.parts[name];
      const bar = el("i", { style: `left: ${100 * begin / longest}%; width: ${100 * value / longest}%; background: var(--${role})` });
      begin += value;
      const none = value >= 500 ? "" : " none";
      return [el("span", { class: none }, partName(name)), el("div", { class: "track" }, value >= 500 ? bar : null),
        el("span", { class: "num" + none }, num(`${pointer}/parts/${name}`, "time")), el("span", { class: "share" + none }, num(`${pointer}/parts/${name}`, "share", { over: `${pointer}/step` }))];
    });
    const folded = rank.stands_for > 1 ? `, stands for ${rank.stands_for} ranks` : "";
    return el("div", { class: "side" }, el("h3", {}, `${named(index)}, rank ${rankOf(index)}${folded}`),
      el("div", { class: "falls" }, rows, el("div", { class: "rule" }),
        el("span", { class: "total" }, "step"),
        el("div", { class: "track" }, el("i", { style: `left: 0; width: ${100 * rank.step / longest}%; background: var(--soft); opacity: .55` })),
        el("span", { class: "total" }, num(`${pointer}/step`, "time")), el("span", { class: "share" })),
      side.labels.note ? el("p", { class: "note" }, `This step: ${side.labels.note}.`) : null);
  })));
}
