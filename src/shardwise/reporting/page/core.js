// Data, formats, elements and the tooltip. Every number on the page is a place in the data: an
// element made by `num` carries the JSON pointer of its value and the name of its format.
"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const sides = data.sides;
const state = { rank: "slowest", metric: "compute", phase: "step" };
const charts = {};

// The colour of each part of a step.
const PARTS = {
  compute: "compute", contention: "contention", exposed_transfer: "transfer",
  waiting_for_peers: "waiting", copies: "copy", host_idle: "host",
};
const partName = part => part.replaceAll("_", " ");
const SPAN_ROLES = { compute: "compute", transfer: "transfer", waiting: "waiting for peers", copy: "copy", host: "host" };

const grouped = text => text.replace(/\B(?=(\d{3})+(?!\d))/g, ",");
const show = {
  time(ns) {
    const ms = ns / 1e6;
    if (Math.abs(ns) < 500) return "0 ms";
    if (Math.abs(ms) < 0.1) return (ms * 1e3).toFixed(0) + " µs";
    if (Math.abs(ms) < 10) return ms.toFixed(2) + " ms";
    if (Math.abs(ms) < 100) return ms.toFixed(1) + " ms";
    return grouped(ms.toFixed(0)) + " ms";
  },
  bytes(count) {
    for (const unit of ["B", "KiB", "MiB"]) {
      if (Math.abs(count) < 1024) return count.toFixed(unit === "B" || Math.abs(count) >= 100 ? 0 : 1) + " " + unit;
      count /= 1024;
    }
    const [whole, rest] = count.toFixed(2).split(".");
    return grouped(whole) + "." + rest + " GiB";
  },
  share(part) {
    const percent = 100 * part;
    return percent.toFixed(Math.abs(percent) >= 0.05 && Math.abs(percent) < 9.95 ? 1 : 0) + " %";
  },
  count: value => grouped(value.toFixed(0)),
  number: value => value.toFixed(3),
  rate: value => (value / 1e9).toFixed(value < 1e10 ? 2 : 0) + " GB/s",
  text: value => String(value),
};

function at(pointer) {
  return pointer.split("/").slice(1).reduce(
    (value, key) => value == null ? value : value[key.replaceAll("~1", "/").replaceAll("~0", "~")], data);
}
const capital = text => text.charAt(0).toUpperCase() + text.slice(1);
const escaped = key => String(key).replaceAll("~", "~0").replaceAll("/", "~1");

function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") element.style.cssText = value;
    else if (value !== false && value != null) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter(child => child != null));
  return element;
}

// A number from the data; one pointer "over" another is their ratio, "less" their difference.
function num(pointer, as, { over, less } = {}) {
  let value = at(pointer);
  if (over) value /= at(over);
  if (less) value -= at(less);
  const text = value == null || Number.isNaN(value) ? "–" : (less && value > 0 ? "+" : "") + show[as](value);
  return el("span", { class: "num", "data-path": pointer, "data-as": as, "data-over": over, "data-less": less }, text);
}

const probe = document.body.appendChild(el("i", { hidden: true }));
function colour(name) {
  probe.style.color = `var(--${name})`;
  return getComputedStyle(probe).color;
}
const key = (name, text, kind = "") => el("span", { class: "key " + kind, style: `--key: var(--${name})` }, text);

// The rank that a side shows: the chosen one; its slowest where none is chosen or it is not there.
function rankOf(index) {
  return state.rank in sides[index].ranks ? state.rank : String(sides[index].slowest);
}
// The label of a side; one whose network is modelled says so.
const named = index => sides[index].label + (sides[index].source === "emulated" && sides[index].label !== "emulated" ? " (emulated)" : "");
const pointerOf = index => `/sides/${index}/ranks/${rankOf(index)}`;

function section(id, title, lead, ...content) {
  return el("section", { id }, el("h2", {}, title), lead ? el("p", { class: "lead" }, lead) : null, content);
}
// A section that ends with a note where its content would be.
function endWith(found, note) {
  found.append(note);
  return found;
}
const missing = (...words) => el("p", { class: "note missing" }, ...words);
const command = text => el("code", {}, text);
// What is missing, and that profiling does this to it: "records it".
const unprofiled = (what, does) => missing(`${what}: `, command("shardwise train --profile 3"), ` ${does}.`);

const tip = document.getElementById("tip");
function showTip(x, y, ...content) {
  tip.replaceChildren(...content);
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = x + 14 + box.width > innerWidth - 8 ? Math.max(8, x - box.width - 14) : x + 14;
  tip.style.left = left + "px";
  tip.style.top = Math.max(8, Math.min(y + 14, innerHeight - box.height - 8)) + "px";
}
function hideTip() { tip.hidden = true; }
addEventListener("scroll", hideTip, { passive: true });
