// Message size against bandwidth: the curve of the cluster, and this run's messages on it.
"use strict";

const WIRE = { "all-gather": "compute", "reduce-scatter": "transfer", "all-reduce": "waiting", "all-to-all": "transfer" };

function drawWire() {
  const found = section("wire", "Message size and bandwidth",
    "Lines: what the cluster's description expects. Dots: this step's messages, without waiting for late peers.");
  const used = data.wires.filter(wire => wire.messages.length);
  if (!used.length) return endWith(found, data.wires.length ? missing("No message of 1 KiB or more was sent in this step.")
      : unprofiled("No messages were recorded", "records them"));
  const names = [...new Set(used.flatMap(wire => [...wire.curve, ...wire.messages].map(entry => entry.collective)))];
  found.append(el("div", { class: "legend" }, names.map(name => key(WIRE[name] || "copy", name, "dot"))));
  const boxes = used.map(wire => {
    const host = el("div", { class: "plot" });
    const title = [data.wires.length > 1 ? wire.label : "", wire.cluster && `cluster ${wire.cluster}`].filter(Boolean).join(", ");
    return { wire, host, box: el("div", {}, el("h3", {}, title), host) };
  });
  found.append(el("div", { class: "pair" }, boxes.map(({ box }) => box)));
  found.mount = () => boxes.forEach(({ wire, host }) => plotWire(host, wire));
  return found;
}

function plotWire(host, wire) {
  const points = wire.messages.map(m => ({ ...m, rate: m.bytes / m.seconds })), curves = {};
  for (const { collective, ranks, bytes, seconds } of wire.curve)
    (curves[`${collective} ${ranks}`] ??= { collective, at: [] }).at.push([bytes, bytes / seconds]);
  const lines = Object.values(curves);
  for (const { at } of lines) at.sort((a, b) => a[0] - b[0]);
  const all = [...points.map(p => [p.bytes, p.rate]), ...lines.flatMap(line => line.at)];
  const span = k => { const v = all.map(p => p[k]); return [Math.min(...v) / 1.5, Math.max(...v) * 1.5]; };
  const between = (values, [low, high]) => values.filter(value => value >= low && value <= high);
  // Sizes in powers of two, as many as there is room for; rates in 1, 2, 5, or powers of ten.
  const sizes = u => { const all = between([...Array(45).keys()].map(i => 2 ** i), span(0)), every = Math.ceil(all.length / (u.width / 75)); return all.filter((_, i) => i % every === 0); };
  const rates = () => { const wide = span(1)[1] / span(1)[0], steps = wide > 200 ? [1] : wide > 6 ? [1, 2, 5] : [1, 1.5, 2, 3, 4, 5, 6, 8]; return between([...Array(16).keys()].flatMap(i => steps.map(k => k * 10 ** i)), span(1)); };
  const chart = plot(host, {
    id: "wire", height: 280,
    cursor: { drag: { x: false, y: false }, points: { show: false } },
    scales: { x: { time: false, distr: 3, log: 2, range: span(0) }, y: { distr: 3, range: span(1) } },
    axes: [axis({ label: "bytes of a message", splits: sizes, filter: (_, s) => s, values: (_, s) => s.map(shortBytes) }),
      axis({ label: "GB/s", size: 50, splits: rates, filter: (_, s) => s, values: (_, s) => s.map(v => String(+(v / 1e9).toPrecision(2))) })],
    series: [{}, { show: false }],
    hooks: { draw: [u => paintWire(u, lines, points)] },
  }, [span(0), [null, null]]);
  charts.wire = chart;
  answer(chart, (x, y) => {
    let best = null, least = 14;
    for (const p of points) {
      const away = Math.hypot(chart.valToPos(p.bytes, "x") - x, chart.valToPos(p.rate, "y") - y);
      if (away < least) { least = away; best = p; }
    }
    return best && [el("div", {}, el("b", {}, best.collective), ` of ${best.unit || "the root"}`), el("div", {}, `${best.phase}, ${best.ranks} ranks`),
      el("div", {}, `${show.bytes(best.bytes)} in ${show.time(best.seconds * 1e9)}: ${show.rate(best.rate)}`),
      best.exposed_s ? el("div", {}, `exposed ${show.time(best.exposed_s * 1e9)}`) : ""];
  });
}

function paintWire(chart, lines, points) {
  const { ctx } = chart, ratio = devicePixelRatio || 1;
  ctx.save();
  ctx.lineWidth = 1.5 * ratio;
  const dashes = { "all-gather": [], "reduce-scatter": [7, 4], "all-reduce": [2, 3], "all-to-all": [7, 4] };
  for (const line of lines) {
    ctx.setLineDash((dashes[line.collective] || []).map(part => part * ratio));
    ctx.strokeStyle = colour(WIRE[line.collective] || "copy");
    ctx.globalAlpha = 0.7;
    ctx.beginPath();
    line.at.forEach(([bytes, rate], i) => ctx[i ? "lineTo" : "moveTo"](chart.valToPos(bytes, "x", true), chart.valToPos(rate, "y", true)));
    ctx.stroke();
  }
  ctx.setLineDash([]);
  ctx.lineWidth = ratio;
  ctx.globalAlpha = 0.85;
  for (const p of points) {
    ctx.fillStyle = colour(WIRE[p.collective] || "copy");
    ctx.strokeStyle = colour("card");
    ctx.beginPath();
    ctx.arc(chart.valToPos(p.bytes, "x", true), chart.valToPos(p.rate, "y", true), 4.5 * ratio, 0, 2 * Math.PI);
    ctx.fill();
    ctx.stroke();
  }
  ctx.restore();
}
