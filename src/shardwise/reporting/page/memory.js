// What memory held, by role, over the step; its peak, the allocator's reserve and the limit.
"use strict";

const MEMORY_ROLES = ["parameters", "full", "gradients", "slots", "state", "activations", "temporary", "other"];
const MEMORY_NAMES = { full: "full parameters", slots: "reduce slots", state: "optimizer state" };
const memoryKey = role => key(MEMORY_ROLES.includes(role) ? role : "other", MEMORY_NAMES[role] || role);

function drawMemory() {
  const found = section("memory", "Memory of this rank", "Bytes by role, stacked, over the time of the step.");
  const shown = sides.map((side, index) => ({ side, index, memory: side.ranks[rankOf(index)].memory })).filter(entry => entry.memory);
  if (!shown.length) return endWith(found, unprofiled("No memory was recorded", "records it"));
  const roles = MEMORY_ROLES.filter(role => shown.some(({ memory }) => role in memory.roles));
  const peak = Math.max(...shown.map(({ memory }) => memory.peak.total));
  const limits = shown.map(({ memory }) => memory.limit).filter(Boolean);
  const near = limits.length && Math.min(...limits) < 1.8 * peak;
  const highest = Math.max(peak, ...shown.map(({ memory }) => memory.reserved_peak || 0), near ? Math.max(...limits) : 0) * 1.08;
  found.append(el("div", { class: "pair" }, shown.map(({ side, index, memory }) => {
    const host = el("div", { class: "plot" });
    const box = el("div", {}, el("h3", {}, side.label), host);
    box.mount = () => plotMemory(host, side, memory, roles, highest, index);
    return box;
  })));
  found.append(tableMemory(shown, roles, near));
  const listed = shown.filter(({ memory }) => memory.largest.length);
  if (listed.length) found.append(el("details", {}, el("summary", {}, "Largest allocations at the peak"), el("div", { class: "pair" }, listed.map(({ side, index }) => {
    const pointer = `${pointerOf(index)}/memory/largest`;
    return el("table", {}, at(pointer).map((entry, i) => el("tr", {}, el("td", { class: "num" }, num(`${pointer}/${i}/bytes`, "bytes")),
      el("td", {}, memoryKey(entry.role)), el("td", {}, entry.what))));
  }))));
  found.mount = () => found.querySelectorAll(".pair > div").forEach(box => box.mount && box.mount());
  return found;
}

// The legend, with what each role held at the peak.
function tableMemory(shown, roles, near) {
  const row = (title, cells, attributes = {}) => el("tr", attributes, el("td", {}, title), cells.map(cell => el("td", { class: "num" }, cell)));
  const cell = (entry, rest, as = "bytes") => at(`${pointerOf(entry.index)}/memory/${rest}`) == null ? "–" : num(`${pointerOf(entry.index)}/memory/${rest}`, as);
  const rows = roles.map(role => row(memoryKey(role), shown.map(entry => cell(entry, `peak/by_role/${role}`))));
  rows.push(row(el("b", {}, "at the peak"), shown.map(entry => el("b", {}, cell(entry, "peak/total")))));
  rows.push(row("time of the peak", shown.map(entry => cell(entry, "peak/time", "time"))));
  if (shown.some(({ memory }) => memory.allocated_peak)) rows.push(row("allocator's own peak", shown.map(entry => cell(entry, "allocated_peak"))));
  if (shown.some(({ memory }) => memory.reserved)) rows.push(row(key("soft", "reserved by the allocator", "dash"), shown.map(entry => cell(entry, "reserved_peak"))));
  if (shown.some(({ memory }) => memory.limit)) rows.push(row(near ? key("warn", "limit", "dash") : "limit (above the chart)", shown.map(entry => cell(entry, "limit"))));
  return el("table", { class: "roles" }, el("thead", {}, el("tr", {}, el("th", {}, "role"), shown.map(({ side }) => el("th", { class: "num" }, side.label)))), el("tbody", {}, rows));
}

function plotMemory(host, side, memory, roles, highest, index) {
  const own = roles.filter(role => role in memory.roles);
  const times = memory.times.map(time => time / 1e6), last = times[times.length - 1];
  const end = Math.max(last, side.step / 1e6);
  let sum = memory.times.map(() => 0);
  const tops = own.map(role => (sum = sum.map((value, i) => value + memory.roles[role][i])));
  const columns = [[...times, end], ...tops.map(top => [...top, top[top.length - 1]]).reverse()];
  const shades = [...own].reverse();
  const chart = plot(host, {
    id: "memory-" + index,
    ...overTime({
      height: 240, range: [0, highest],
      heights: axis({ values: (_, splits) => splits.map(shortBytes), size: 68, incrs: BINARY }),
      series: [{}, ...shades.map(role => ({ fill: colour(role), width: 0, paths: uPlot.paths.stepped({ align: 1 }), points: { show: false } }))],
      draw: u => paintMemory(u, memory),
    }),
  }, columns);
  charts["memory" + index] = chart;
  zoomable(chart);
  answer(chart, x => {
    const time = chart.posToVal(x, "x") * 1e6, i = Math.max(0, countUntil(memory.times, time) - 1);
    const total = own.reduce((whole, role) => whole + memory.roles[role][i], 0);
    const rows = shades.filter(role => memory.roles[role][i]).map(role =>
      el("tr", {}, el("td", {}, memoryKey(role)), el("td", { class: "num" }, show.bytes(memory.roles[role][i]))));
    return [el("div", {}, el("b", {}, show.bytes(total)), ` at ${show.time(time)}`), el("table", {}, rows)];
  });
}

function paintMemory(chart, memory) {
  const { ctx, bbox } = chart, ratio = devicePixelRatio || 1;
  const x = ns => chart.valToPos(ns / 1e6, "x", true), y = bytes => chart.valToPos(bytes, "y", true);
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
  ctx.clip();
  ctx.lineWidth = 1.5 * ratio;
  ctx.setLineDash([5 * ratio, 4 * ratio]);
  if (memory.reserved) {
    const { times, bytes } = memory.reserved;
    ctx.strokeStyle = colour("soft");
    ctx.beginPath();
    times.forEach((time, i) => { if (i) ctx.lineTo(x(time), y(bytes[i - 1])); ctx.lineTo(x(time), y(bytes[i])); });
    ctx.lineTo(bbox.left + bbox.width, y(bytes[bytes.length - 1]));
    ctx.stroke();
  }
  if (memory.limit) {
    ctx.strokeStyle = colour("warn");
    ctx.beginPath();
    ctx.moveTo(bbox.left, y(memory.limit));
    ctx.lineTo(bbox.left + bbox.width, y(memory.limit));
    ctx.stroke();
  }
  ctx.setLineDash([]);
  const px = x(memory.peak.time), py = y(memory.peak.total);
  ctx.fillStyle = colour("ink");
  ctx.strokeStyle = colour("card");
  ctx.beginPath();
  ctx.arc(px, py, 4.5 * ratio, 0, 2 * Math.PI);
  ctx.fill();
  ctx.stroke();
  ctx.font = `600 ${12 * ratio}px system-ui, sans-serif`;
  ctx.textAlign = px > bbox.left + bbox.width * 0.75 ? "right" : "left";
  ctx.lineWidth = 3 * ratio;
  const text = "peak " + show.bytes(memory.peak.total), tx = px + (ctx.textAlign === "left" ? 8 : -8) * ratio, ty = Math.max(py - 6 * ratio, bbox.top + 12 * ratio);
  ctx.strokeText(text, tx, ty);
  ctx.fillText(text, tx, ty);
  ctx.restore();
}
