// Puts the sections in order, and draws them again when the rank or the theme changes.
"use strict";

const page = document.getElementById("page");
const dark = matchMedia("(prefers-color-scheme: dark)");
function matchesDark() {
  const theme = document.documentElement.dataset.theme;
  return theme ? theme === "dark" : dark.matches;
}

function drawPlan() {
  const found = section("plan", "Plan, configuration, versions", null);
  found.append(el("div", { class: "pair", style: "margin-top: .75rem" }, data.runs.map((run, index) => el("div", {},
    data.runs.length > 1 ? el("h3", {}, run.label) : null,
    run.plan ? el("pre", { class: "plan" }, run.plan) : missing("The plan is not known: ", command("shardwise train"), " writes plan.json and explains it."),
    Object.keys(run.settings).length ? el("details", {}, el("summary", {}, "All settings of the plan"), el("table", { class: "facts" },
      Object.entries(run.settings).map(([name, value]) => el("tr", {}, el("th", {}, name), el("td", {}, Array.isArray(value) ? value.join(" x ") : String(value)))))) : null,
    run.config ? el("details", {}, el("summary", {}, "config.toml"), el("pre", {}, run.config)) : null,
    Object.keys(run.facts).length ? el("table", { class: "facts", style: "margin-top: .9rem" }, Object.entries(run.facts).map(([name, value]) => el("tr", {}, el("th", {}, name.replaceAll("_", " ")),
      el("td", {}, typeof value === "number" ? num(`/runs/${index}/facts/${escaped(name)}`, Number.isInteger(value) ? "count" : "number") : String(value))))) : null))));
  return found;
}

const SECTIONS = [drawFindings, drawWaterfall, drawStreams, drawMemory, drawUnits, drawKernels, drawWire, drawCurves, drawPlan];

function draw() {
  const keep = scrollY;
  forget(page);
  timed.clear();
  page.append(drawTiles());
  const summary = drawSummary();
  if (summary) page.append(summary);
  for (const make of SECTIONS) {
    const found = make();
    page.append(found);
    if (found.mount) found.mount();
  }
  look(visible.min, visible.max);
  scrollTo(0, keep);
}

function drawBar() {
  const bar = document.getElementById("bar");
  bar.append(el("h1", {}, data.title, el("small", {}, "shardwise")));
  const ranks = [...new Set(sides.flatMap(side => Object.keys(side.ranks)))].sort((a, b) => a - b);
  if (ranks.length > 1) bar.append(el("label", {}, "rank", el("select", { id: "rank", onchange: event => { state.rank = event.target.value; draw(); } },
    ["slowest", ...ranks].map(rank => el("option", { value: rank, selected: rank === state.rank }, rank)))));
  bar.append(el("button", { id: "theme", type: "button", title: "light or dark", "aria-label": "switch between light and dark", onclick: () => {
    document.documentElement.dataset.theme = matchesDark() ? "light" : "dark";
    draw();
  } }, "◐"));
}

visible.end = Math.max(1e-3, ...sides.map(side => side.step / 1e6), ...sides.flatMap(side => Object.values(side.ranks).map(rank => rank.step / 1e6)));
visible.max = visible.end;
drawBar();
draw();
dark.addEventListener("change", draw);
