// Loss, throughput and the rest over the run's steps.
"use strict";

const LINES = ["compute", "transfer"];

function drawCurves() {
  const found = section("curves", "Over the run", null);
  if (!data.curves.length) return endWith(found, missing("No steps were logged: ", command("shardwise train"), " logs them."));
  const labels = [...new Set(data.curves.flatMap(curve => curve.lines.map(line => line.label)))];
  if (labels.length > 1) found.append(el("div", { class: "legend", style: "margin-top: .4rem" }, labels.map((label, i) => key(LINES[i], label))));
  const boxes = data.curves.map((curve, index) => {
    const host = el("div", { class: "plot" });
    const latest = curve.lines.map((_, i) => num(`/curves/${index}/lines/${i}/late`, curve.kind));
    const values = el("span", { class: "note" }, curve.lines.length ? "second half: " : "", latest.flatMap((value, i) => i ? [" and ", value] : [value]));
    return { curve, host, labels, box: el("div", {}, el("div", { class: "head" }, el("h3", {}, curve.title), values), curve.lines.length ? host : missing(curve.note), typeof curve.level === "number" && curve.lines.length ? el("p", { class: "note" }, `Dashed: ${curve.level_name}, `, num(`/curves/${index}/level`, curve.kind), ".") : null) };
  });
  found.append(el("div", { class: "curves" }, boxes.map(({ box }) => box)));
  found.mount = () => boxes.forEach(({ curve, host }) => { if (curve.lines.length) plotCurve(host, curve, labels); });
  return found;
}

const TICKS = {
  number: value => String(+value.toPrecision(3)),
  count: value => Math.abs(value) >= 1e6 ? +(value / 1e6).toPrecision(3) + " M" : Math.abs(value) >= 1e3 ? +(value / 1e3).toPrecision(3) + " k" : grouped(value.toFixed(0)),
  share: value => +(100 * value).toPrecision(3) + " %",
  bytes: shortBytes,
};

function plotCurve(host, curve, labels) {
  const joined = uPlot.join(curve.lines.map(line => [line.x, line.y]));
  const level = typeof curve.level === "number" ? curve.level : null;
  const series = [{}, ...curve.lines.map(line => ({ label: line.label, stroke: colour(LINES[labels.indexOf(line.label)]), width: 1.75, points: { show: line.x.length < 3 }, spanGaps: true }))];
  if (level !== null) { joined.push(joined[0].map(() => level)); series.push({ label: curve.level_name, stroke: colour("soft"), width: 1.25, dash: [4, 4], points: { show: false } }); }
  const tick = TICKS[curve.kind];
  const chart = plot(host, {
    id: curve.name, height: 190,
    cursor: { y: false, drag: { x: false, y: false }, points: { size: 7 } },
    scales: { x: { time: false }, y: { range: (_, low, high) => curve.kind === "number" ? [low - 0.05 * (high - low || 1), high + 0.05 * (high - low || 1)] : [0, high * 1.08 || 1] } },
    axes: [axis({ label: "step", values: (_, s) => s.map(v => Number.isInteger(v) ? grouped(String(v)) : "") }), axis({ size: 62, values: (_, s) => s.map(tick), ...(curve.kind === "bytes" ? { incrs: BINARY } : {}) })],
    series,
  }, joined);
  charts[curve.name] = chart;
  answer(chart, () => {
    const i = chart.cursor.idx;
    if (i == null) return null;
    const rows = curve.lines.map((line, k) => joined[k + 1][i] == null ? null : el("div", {}, key(LINES[labels.indexOf(line.label)], `${labels.length > 1 ? line.label + " " : ""}${show[curve.kind](joined[k + 1][i])}`)));
    return [el("div", {}, el("b", {}, `step ${joined[0][i]}`)), ...rows.filter(Boolean),
      ...(level === null ? [] : [el("div", { class: "note" }, `${curve.level_name} ${show.number(level)}`)])];
  });
}
