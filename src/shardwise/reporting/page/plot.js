// What all charts share: axes in the page's colours, size, zoom by wheel, drag and fingers.
"use strict";

const FONT = "12px system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif";
const plots = new Set();

function axis(extra) {
  return {
    stroke: colour("soft"), font: FONT, labelFont: FONT, labelGap: 2, labelSize: 18, gap: 4, size: 26,
    grid: { stroke: colour("line"), width: 1 }, ticks: { stroke: colour("line"), width: 1, size: 4 }, ...extra,
  };
}

function plot(host, options, columns) {
  const chart = new uPlot({
    width: Math.max(200, host.clientWidth), legend: { show: false }, padding: [8, 10, 0, 0], ...options,
  }, columns, host);
  chart.root.dataset.chart = options.id || "";
  plots.add(chart);
  return chart;
}

function forget(host) {
  for (const chart of plots) if (host.contains(chart.root)) { chart.destroy(); plots.delete(chart); }
  host.replaceChildren();
}

addEventListener("resize", () => {
  for (const chart of plots) {
    const width = Math.max(200, chart.root.parentElement.clientWidth);
    if (Math.abs(width - chart.width) > 1) chart.setSize({ width, height: chart.height });
  }
});

// Charts over the time of the step move together.
const timed = new Set();
const visible = { min: 0, max: 1, end: 1 };

function look(min, max) {
  const least = Math.max(visible.end * 1e-6, 1e-5);
  const width = Math.min(Math.max(max - min, least), visible.end);
  visible.min = Math.min(Math.max(min, 0), visible.end - width);
  visible.max = visible.min + width;
  for (const chart of timed) chart.setScale("x", { min: visible.min, max: visible.max });
  const whole = visible.min <= 0 && visible.max >= visible.end;
  for (const button of document.querySelectorAll("button.reset")) button.disabled = whole;
  hideTip();
}
const lookAtAll = () => look(0, visible.end);

function zoomable(chart) {
  timed.add(chart);
  const over = chart.over;
  const timeAt = clientX => {
    const box = over.getBoundingClientRect();
    return visible.min + (clientX - box.left) / box.width * (visible.max - visible.min);
  };
  const scale = (clientX, factor) => {
    const middle = timeAt(clientX);
    look(middle - (middle - visible.min) * factor, middle + (visible.max - middle) * factor);
  };
  over.addEventListener("wheel", event => {
    const span = visible.max - visible.min;
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      if (span >= visible.end) return;
      event.preventDefault();
      const shift = event.deltaX / over.clientWidth * span;
      look(visible.min + shift, visible.max + shift);
      return;
    }
    if (event.deltaY > 0 && span >= visible.end) return;  // nothing more to see: let the page scroll
    event.preventDefault();
    scale(event.clientX, Math.exp(Math.max(-1, Math.min(1, event.deltaY / 240))));
  }, { passive: false });
  over.addEventListener("dblclick", lookAtAll);

  let fingers = null;
  const read = event => [...event.touches].map(touch => touch.clientX).sort((a, b) => a - b);
  over.addEventListener("touchstart", event => { fingers = read(event); }, { passive: true });
  over.addEventListener("touchmove", event => {
    const now = read(event);
    if (!fingers || now.length !== fingers.length) { fingers = now; return; }
    if (now.length === 2) {
      event.preventDefault();
      scale((now[0] + now[1]) / 2, Math.max(20, fingers[1] - fingers[0]) / Math.max(20, now[1] - now[0]));
    } else if (now.length === 1 && visible.max - visible.min < visible.end) {
      const shift = (fingers[0] - now[0]) / over.clientWidth * (visible.max - visible.min);
      look(visible.min + shift, visible.max + shift);
    }
    fingers = now;
  }, { passive: false });
  over.addEventListener("touchend", () => { fingers = null; });
}

// What a chart says where the mouse is: `describe` gives the tooltip's content, or nothing.
function answer(chart, describe) {
  chart.over.addEventListener("mousemove", event => {
    const box = chart.over.getBoundingClientRect();
    const content = event.buttons ? null : describe(event.clientX - box.left, event.clientY - box.top, box);
    if (content) showTip(event.clientX, event.clientY, ...content); else hideTip();
  });
  chart.over.addEventListener("mouseleave", hideTip);
}

// Sizes at the ticks of an axis, and where it may have them.
const shortBytes = value => value ? show.bytes(value).replace(/\.0+ /, " ") : "0";
const BINARY = [...Array(50).keys()].map(i => 2 ** i);

// Options of a chart over the step's time, in milliseconds, with a range and an axis for its heights.
function overTime({ height, range, heights, series, draw, ...more }) {
  return {
    height, series, scales: { x: { time: false, range: (_, a, b) => [a, b] }, y: { range } },
    axes: [axis({ label: "milliseconds into the step", values: (_, splits) => milliseconds(splits), size: 24 }), heights],
    cursor: {
      y: false, points: { show: false }, drag: { x: true, y: false, setScale: false },
      bind: { dblclick: () => null }, sync: { key: "step", setSeries: false },
    },
    hooks: {
      setSelect: [chart => {
        if (chart.select.width < 3) return;
        const [a, b] = [chart.select.left, chart.select.left + chart.select.width].map(x => chart.posToVal(x, "x"));
        chart.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
        look(a, b);
      }],
      draw: [draw],
    },
    ...more,
  };
}
const milliseconds = splits => {
  const step = splits.length > 1 ? splits[1] - splits[0] : 1;
  const digits = Math.max(0, Math.min(6, Math.ceil(-Math.log10(step) - 1e-9)));
  return splits.map(value => value.toFixed(digits));
};
const resetButton = () => el("button", { class: "reset", type: "button", disabled: true, onclick: lookAtAll }, "Whole step");
