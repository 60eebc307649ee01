// Which kernels take the time of a step and of its phases; on a CPU, which operators.
"use strict";

const KERNEL_COLOURS = {
  products: "compute", attention: "contention", softmax: "waiting", norms: "state", elementwise: "transfer",
  reductions: "activations", copies: "copy", optimizer: "parameters", other: "other",
};

function drawKernels() {
  const found = section("kernels", "Kernels",
    "By name, from the traced step: a device's kernels, or a CPU's operators by their own time. Shares are of all that computes; collectives run beside it.");
  const known = data.kernels.filter(run => Object.keys(run.ranks).length);
  if (!known.length) return endWith(found, unprofiled("No kernels were recorded", "records them"));
  const body = el("div", { class: "pair" });
  const choose = phase => { state.phase = phase; fillKernels(body); tabs.forEach(([name, tab]) => tab.setAttribute("aria-pressed", String(name === phase))); };
  const tabs = ["step", "forward", "backward", "optimizer"].map(name => [name, el("button", { type: "button", "aria-pressed": String(name === state.phase), onclick: () => choose(name) }, capital(name))]);
  found.append(el("div", { class: "row", style: "margin-bottom: .6rem" }, tabs.map(([, tab]) => tab)), body);
  fillKernels(body);
  return found;
}

function fillKernels(body) {
  body.replaceChildren(...data.kernels.flatMap((run, index) => {
    const ranks = Object.keys(run.ranks);
    if (!ranks.length) return [];
    const slowest = String(sides[Math.min(index, sides.length - 1)].slowest);
    const rank = [state.rank, slowest, ranks[0]].find(each => each in run.ranks);
    const pointer = `/kernels/${index}/ranks/${rank}/${state.phase}`, phase = at(pointer);
    const title = el("h3", {}, `${data.kernels.length > 1 ? run.label + ", " : ""}rank ${rank}, ${state.phase}`);
    if (!phase.compute) return [el("div", {}, title, missing(`Nothing was computed in this phase.`))];
    const groups = Object.entries(phase.groups).sort((a, b) => b[1] - a[1]).flatMap(([name, ns]) => [
      el("span", {}, name), el("div", { class: "track" }, el("i", { style: `left: 0; width: ${100 * ns / phase.compute}%; background: var(--${KERNEL_COLOURS[name] || "other"})` })),
      num(`${pointer}/groups/${name}`, "time"), el("span", { class: "share" }, num(`${pointer}/groups/${name}`, "share", { over: `${pointer}/compute` }))]);
    const rows = phase.longest.map((kernel, i) => el("tr", {}, el("td", {}, kernel.name), el("td", { class: "unit" }, kernel.group),
      el("td", { class: "num" }, num(`${pointer}/longest/${i}/count`, "count")), el("td", { class: "num" }, num(`${pointer}/longest/${i}/ns`, "time")),
      el("td", { class: "num apart" }, num(`${pointer}/longest/${i}/ns`, "share", { over: `${pointer}/compute` }))));
    const heads = [el("th", {}, "kernel"), el("th", {}, "group"), el("th", { class: "num" }, "calls"), el("th", { class: "num" }, "time"), el("th", { class: "num apart" }, "share")];
    return [el("div", {}, title, el("div", { class: "falls" }, groups)),
      el("div", { class: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, heads)), el("tbody", {}, rows)))];
  }));
}
