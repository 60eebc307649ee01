// The figures at the top, and the findings.
"use strict";

// One figure: of a run with its prediction below, of two runs each under its name.
function tile(title, values, note = "") {
  const [first, second] = values;
  if (data.kind === "comparison" && sides.length > 1)
    return el("div", { class: "tile two" }, el("span", {}, title), values.map((value, i) => value && [el("b", {}, value), el("span", { class: "name" }, sides[i].label)]));
  return el("div", { class: "tile" }, el("span", {}, title), el("b", {}, first), el("span", {}, ...(second ? [sides[1].label + " ", second] : [note])));
}

function drawTiles() {
  const tiles = [];
  if (sides.length) {
    const ranks = index => Object.entries(sides[index].ranks);
    const each = make => sides.map((_, index) => make(index));
    const part = (name, rank, index) => num(`/sides/${index}/ranks/${rank}/parts/${name}`, "share", { over: `/sides/${index}/ranks/${rank}/step` });
    const most = index => ranks(index).reduce((a, b) => b[1].parts.waiting_for_peers > a[1].parts.waiting_for_peers ? b : a)[0];
    tiles.push(tile("Step", each(index => num(`/sides/${index}/step`, "time"))));
    for (const name of ["compute", "exposed_transfer"])
      tiles.push(tile(capital(partName(name)), each(index => part(name, sides[index].slowest, index)), "of the step"));
    tiles.push(tile("Waiting, at most", each(index => part("waiting_for_peers", most(index), index)), `rank ${most(0)}`));
    const peaks = each(index => {
      const held = ranks(index).filter(([, rank]) => rank.memory);
      if (!held.length) return null;
      const [rank] = held.reduce((a, b) => b[1].memory.peak.total > a[1].memory.peak.total ? b : a);
      return num(`/sides/${index}/ranks/${rank}/memory/peak/total`, "bytes");
    });
    if (peaks[0]) tiles.push(tile("Peak memory, at most", peaks, "of one rank"));
  } else {
    data.curves.forEach((curve, index) => {
      if (curve.lines.length) tiles.push(tile(curve.title.split(",")[0], [num(`/curves/${index}/lines/0/late`, curve.kind)], "median of the second half"));
    });
  }
  return el("div", { class: "tiles" }, tiles);
}

// Words between backticks are code.
const marked = text => text.split("`").map((part, i) => i % 2 ? el("code", {}, part) : part);

function listFindings(name) {
  return el("ol", { class: "findings" }, data[name].map((finding, index) => el("li",
    { class: finding.urgent ? "urgent" : finding.cost_ns ? "costly" : "", "data-kind": finding.kind },
    el("div", { class: "what" }, ...marked(finding.what)),
    finding.cost_ns ? el("div", { class: "cost" }, num(`/${name}/${index}/cost_ns`, "time")) : null,
    finding.change ? el("div", { class: "change" }, ...marked(finding.change)) : null)));
}

function drawFindings() {
  const emulated = sides.some(side => side.source === "emulated");
  const found = section("findings", data.kind === "comparison" ? "What differs" : "What stands out",
    emulated ? "Emulated: collectives copy their data and take the modelled time; what a real network does beyond that is not in these figures." : null);
  found.append(listFindings("findings"));
  if (data.more.length) found.append(el("details", {}, el("summary", {}, `${data.more.length} more`), listFindings("more")));
  return found;
}

function drawSummary() {
  if (!data.summary.length) return null;
  return el("dl", { class: "summary" }, data.summary.slice(0, 2).flatMap(line => {
    const [, name, text] = line.match(/^(\S+)\s+(.*)$/);
    return [el("dt", {}, name), el("dd", {}, text)];
  }));
}
