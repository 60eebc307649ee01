// The streams of a rank, one lane each, both sides on one axis of time; stretches in which compute
// stands still are hatched in the colour of what it waits for.
"use strict";

const LANE = 40, BAR = 20, HEAD = 24;

function buildLanes() {
  const lanes = [];
  let top = 0;
  sides.forEach((side, index) => {
    const rank = side.ranks[rankOf(index)];
    const group = { side, index, rank, top, lanes: [] };
    top += HEAD;
    rank.streams.forEach((stream, number) => {
      const spans = [];
      for (let i = 0; i < rank.start.length; i++) if (rank.stream[i] === number) spans.push(i);
      const lane = { stream, spans, top, group };
      group.lanes.push(lane);
      top += LANE;
    });
    group.bottom = top;
    top += 10;
    lanes.push(group);
  });
  return { groups: lanes, height: top };
}

// Stretches of compute in one phase: forward, backward, optimizer, as often as they alternate.
function phasesOf(rank, texts) {
  if (rank.phases) return rank.phases;
  const found = [];
  for (let i = 0; i < rank.start.length; i++) {
    if (texts[rank.role[i]] !== "compute") continue;
    const phase = texts[rank.phase[i]], end = rank.start[i] + rank.duration[i], last = found[found.length - 1];
    if (last && last.phase === phase) last.end = Math.max(last.end, end);
    else found.push({ phase, start: rank.start[i], end });
  }
  return rank.phases = found;
}

function hatch(context, name, ratio) {
  const size = Math.round(6 * ratio), tile = document.createElement("canvas");
  tile.width = tile.height = size;
  const pen = tile.getContext("2d");
  pen.strokeStyle = colour(name);
  pen.lineWidth = 1.4 * ratio;
  for (const shift of [-size, 0, size]) { pen.moveTo(shift, size); pen.lineTo(shift + size, 0); }
  pen.stroke();
  return context.createPattern(tile, "repeat");
}

// How many of sorted `items` start no later than `time`.
function countUntil(items, time, start = item => item) {
  let low = 0, high = items.length;
  while (low < high) { const middle = (low + high) >> 1; if (start(items[middle]) <= time) low = middle + 1; else high = middle; }
  return low;
}

function paintStreams(chart, groups) {
  const { ctx, bbox } = chart, ratio = devicePixelRatio || 1;
  const min = chart.scales.x.min * 1e6, per = bbox.width / ((chart.scales.x.max - chart.scales.x.min) * 1e6);
  const x = ns => bbox.left + (ns - min) * per, y = px => bbox.top + px * ratio;
  const [ink, soft, card] = ["ink", "soft", "card"].map(colour);
  const fills = Object.fromEntries(Object.keys(SPAN_ROLES).map(role => [role, colour(role)]));
  const patterns = Object.fromEntries(Object.entries(PARTS).map(([kind, role]) => [kind, hatch(ctx, role, ratio)]));
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
  ctx.clip();
  ctx.textBaseline = "middle";
  ctx.textAlign = "left";
  for (const { side, index, rank, top, bottom, lanes } of groups) {
    const texts = side.texts, { gaps } = rank;
    const end = min + bbox.width / per;
    for (let i = 0; i < gaps.start.length; i++) {
      if (gaps.start[i] > end || gaps.start[i] + gaps.duration[i] < min) continue;
      const left = x(gaps.start[i]), width = gaps.duration[i] * per, kind = texts[gaps.kind[i]];
      if (width < 0.4) continue;
      ctx.globalAlpha = 0.1;
      ctx.fillStyle = fills[PARTS[kind]] || soft;
      ctx.fillRect(left, y(top + HEAD), width, (bottom - top - HEAD) * ratio);
      ctx.globalAlpha = 0.65;
      ctx.fillStyle = patterns[kind];
      if (lanes.length) ctx.fillRect(left, y(lanes[0].top + 16), width, BAR * ratio);
    }
    ctx.globalAlpha = 1;
    for (const { top: laneTop, spans } of lanes) paintLane(laneTop, spans, rank, texts);
    // Names last, on a strip of the card's colour, so that they stay readable over the shading.
    ctx.fillStyle = ink;
    ctx.font = `600 ${12.5 * ratio}px system-ui, sans-serif`;
    ctx.fillText(named(index), bbox.left + 2 * ratio, y(top + HEAD / 2));
    let free = bbox.left + ctx.measureText(named(index)).width + 14 * ratio;
    ctx.font = `${11 * ratio}px system-ui, sans-serif`;
    ctx.fillStyle = soft;
    for (const { phase, start, end: until } of phasesOf(rank, texts)) {
      const wide = ctx.measureText(phase).width;
      const left = Math.max(Math.min(Math.max(x(start), bbox.left), bbox.left + bbox.width - wide), free);
      if (x(until) < left - wide || x(start) > bbox.left + bbox.width) continue;
      ctx.fillText(phase, left, y(top + HEAD / 2));
      ctx.fillRect(x(start), y(top + HEAD - 4), Math.max(ratio, x(until) - x(start) - 2 * ratio), ratio);
      free = left + wide + 10 * ratio;
    }
    for (const lane of lanes) {
      const width = ctx.measureText(lane.stream).width;
      ctx.globalAlpha = 0.75;
      ctx.fillStyle = card;
      ctx.fillRect(bbox.left, y(lane.top + 1), width + 6 * ratio, 14 * ratio);
      ctx.globalAlpha = 1;
      ctx.fillStyle = soft;
      ctx.fillText(lane.stream, bbox.left + 2 * ratio, y(lane.top + 8));
    }
  }
  ctx.restore();

  function paintLane(laneTop, spans, rank, texts) {
    const barTop = y(laneTop + 16), tall = BAR * ratio, right = bbox.left + bbox.width;
    const drawn = {};
    let labelled = 0;  // where the last label ends: spans of one lane may lie over each other
    const end = min + bbox.width / per, last = countUntil(spans, end, i => rank.start[i]);
    for (let k = 0; k < last; k++) {
      const i = spans[k];
      if (rank.start[i] + rank.duration[i] < min) continue;
      const role = texts[rank.role[i]];
      let left = Math.max(x(rank.start[i]), bbox.left - 2), width = Math.min(x(rank.start[i] + rank.duration[i]), right + 2) - left;
      // Spans too thin to tell apart are drawn once.
      if (width < 1) { width = 1; const at = Math.floor(left); if (drawn[role] === at) continue; drawn[role] = at; }
      ctx.fillStyle = fills[role];
      ctx.globalAlpha = role === "host" ? 0.55 : 1;
      ctx.fillRect(left, barTop, width > 4 * ratio ? width - ratio : width, tall);
      ctx.globalAlpha = 1;
      if (width > 46 * ratio && role !== "host") label(texts[rank.unit[i]] || texts[rank.name[i]], left, width, role);
    }
    function label(text, left, width, role) {
      ctx.font = `${11 * ratio}px system-ui, sans-serif`;
      const room = width - 10 * ratio;
      let wide = ctx.measureText(text).width;
      if (wide > room) { text = text.slice(text.lastIndexOf(".") + 1); wide = ctx.measureText(text).width; }
      if (wide > room || left < labelled) return;
      labelled = left + 5 * ratio + wide;
      ctx.fillStyle = role === "compute" ? "#fff" : "#1b1d20";
      if (matchesDark()) ctx.fillStyle = "#10151b";
      ctx.fillText(text, left + 5 * ratio, barTop + tall / 2 + ratio);
    }
  }
}

function findSpan(groups, time, height, slack) {
  for (const group of groups) {
    if (height < group.top || height > group.bottom) continue;
    const { rank } = group;
    const lane = group.lanes.find(l => height >= l.top + 12 && height <= l.top + LANE);
    let best = -1;
    if (lane) {
      const from = countUntil(lane.spans, time + slack, i => rank.start[i]);
      for (let k = from - 1; k >= Math.max(0, from - 4000); k--) {
        const i = lane.spans[k];
        if (rank.start[i] + rank.duration[i] + slack < time) continue;
        if (best < 0 || rank.duration[i] < rank.duration[best]) best = i;
      }
    }
    if (best >= 0) return { group, lane, span: best };
    const { gaps } = rank;
    for (let i = 0; i < gaps.start.length; i++)
      if (gaps.start[i] <= time && time <= gaps.start[i] + gaps.duration[i]) return { group, gap: i };
  }
  return null;
}

function describeSpan({ group, lane, span, gap }) {
  const { rank, side } = group, texts = side.texts;
  const line = (...parts) => el("div", {}, ...parts);
  if (gap !== undefined) {
    const { gaps } = rank, unit = texts[gaps.unit[gap]], name = texts[gaps.name[gap]];
    return [line(el("b", {}, partName(texts[gaps.kind[gap]]))), line(`compute stands still ${show.time(gaps.duration[gap])}`),
      name ? line(`for ${name.replaceAll("_", "-")} of ${unit || "the root"}`) : null].filter(Boolean);
  }
  const unit = texts[rank.unit[span]], bytes = rank.bytes[span], took = rank.duration[span];
  return [
    line(el("b", {}, texts[rank.name[span]].replaceAll("_", "-")), unit ? ` of ${unit}` : ""),
    line(`${texts[rank.phase[span]] || "no phase"}, ${SPAN_ROLES[texts[rank.role[span]]]} on ${lane.stream}`),
    line(`${show.time(took)} from ${show.time(rank.start[span])}`),
    bytes ? line(`${show.bytes(bytes)}${took && texts[rank.role[span]] === "transfer" ? `, ${show.rate(bytes / took * 1e9)}` : ""}`) : null,
  ].filter(Boolean);
}

function drawStreams() {
  const found = section("streams", "Streams of this rank",
    "Scroll or drag to zoom, pinch on a phone. Hatched: compute stands still; the colour says for what.");
  if (!sides.length) return endWith(found, unprofiled("No step was profiled", "measures one"));
  found.querySelector("h2").replaceWith(el("div", { class: "head" }, el("h2", {}, "Streams of this rank"), resetButton()));
  const used = new Set(), still = new Set();
  sides.forEach((side, index) => {
    side.ranks[rankOf(index)].role.forEach(role => used.add(side.texts[role]));
    side.ranks[rankOf(index)].gaps.kind.forEach(kind => still.add(side.texts[kind]));
  });
  found.append(el("div", { class: "legend" }, Object.entries(SPAN_ROLES).filter(([role]) => used.has(role)).map(([role, text]) => key(role, text)),
    Object.entries(PARTS).filter(([kind]) => still.has(kind)).map(([kind, role]) => key(role, partName(kind), "hatched"))));
  const host = el("div", { class: "plot" });
  found.append(host);
  found.mount = () => {
    const { groups, height } = buildLanes();
    const chart = charts.streams = plot(host, {
      id: "streams",
      ...overTime({
        height: height + 50, padding: [8, 10, 0, 8], range: [0, 1], heights: { show: false },
        series: [{}, { show: false }], draw: u => paintStreams(u, groups),
      }),
    }, [[0, visible.end], [null, null]]);
    zoomable(chart);
    answer(chart, (x, y, box) => {
      const slack = (visible.max - visible.min) * 1e6 / box.width * 2;
      const hit = findSpan(groups, chart.posToVal(x, "x") * 1e6, y, slack);
      return hit && describeSpan(hit);
    });
  };
  const left = sides.filter(side => side.listed > Object.keys(side.ranks).length);
  if (left.length) found.append(el("p", { class: "note" }, left.map(side =>
    `${side.label}: ${Object.keys(side.ranks).length} of ${side.listed} ranks are drawn here, trace.json has all. `)));
  return found;
}
