// The live page: shows what the server sends. All texts are put in as text, never as markup.
"use strict";

const PHASES = ["data", "generate", "reward", "score", "forward_backward", "optimizer", "vote", "checkpoint", "eval",
  "cleanup", "weight_sync", "callback", "startup", "idle", "unknown"];
const TITLES = { reward: "Reward", completion_length: "Completion length, tokens", kl: "KL", loss: "Loss" };
const OUTSIDE = { starting: "startup", training: "idle", between: "idle", returned: "idle", done: "idle", absent: "unknown", failed: "unknown" };
const KEPT_SECONDS = 600;
const $ = (selector, root = document) => root.querySelector(selector);
const state = { run: null, runs: [], key: "", curves: {}, lanes: new Map(), now: 0, at: 0, seconds: 60, shown: {}, heard: 0 };

function make(tag, fields = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(fields)) {
    if (name === "class") made.className = value;
    else if (name in made) made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children.filter(child => child !== null && child !== undefined).map(child => child instanceof Node ? child : String(child)));
  return made;
}

function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 10) return `${seconds.toFixed(seconds < 1 ? 2 : 1)} s`;
  if (seconds < 100) return `${Math.round(seconds)} s`;
  const units = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]];
  const at = units.findIndex(([, size]) => seconds >= size);
  const [large, small] = [units[at], units[at + 1]];
  const rest = Math.floor(seconds % large[1] / small[1]);
  return `${Math.floor(seconds / large[1])} ${large[0]}` + (rest ? ` ${rest} ${small[0]}` : "");
}

function bytes(value) {
  if (!value) return "–";
  const at = Math.min(4, Math.floor(Math.log(value) / Math.log(1024)));
  return `${+(value / 1024 ** at).toPrecision(3)} ${["B", "KiB", "MiB", "GiB", "TiB"][at]}`;
}

const ago = at => at ? `${duration(Math.max(0, Date.now() / 1000 - at))} ago` : "–";
const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const share = value => value === null || value === undefined ? "–" : `${(value * 100).toFixed(1)} %`;

// Calls `draw` if the value has changed, so that a selection or an open item stays while nothing is new.
function when(name, value, draw) {
  const text = JSON.stringify(value);
  if (state.shown[name] === text) return;
  state.shown[name] = text;
  draw(value);
}

function table(element, titles, rows) {
  const cell = (tag, value, title) => {
    const number = title.startsWith("#"), wide = title.endsWith("?");
    return make(tag, { class: [number && "number", wide && "wide", value && value.late && "late"].filter(Boolean).join(" ") },
      value && value.late ? value.text : value);
  };
  const head = make("tr", {}, ...titles.map(title => cell("th", title.replace(/^#|\?$/g, ""), title)));
  element.replaceChildren(head, ...rows.map(({ cells, current }) => {
    const row = make("tr", {}, ...cells.map((value, at) => cell("td", value, titles[at])));
    if (current) row.setAttribute("aria-current", "true");
    return row;
  }));
}

function showRun(run) {
  state.run = run;
  const verdict = $("#verdict");
  when("verdict", [run.tone, run.state, run.live, run.sentence, run.also, run.trouble], () => {
    verdict.className = run.tone;
    $(".state", verdict).textContent = run.state + (run.live || !["running", "starting"].includes(run.state) ? "" : ", no supervisor");
    $("h1", verdict).textContent = run.sentence;
    $(".also", verdict).textContent = [run.also, run.trouble].filter(Boolean).join(" ");
  });
  document.title = `${run.tone === "bad" ? "⚠ " : ""}${run.step}${run.target_steps ? `/${run.target_steps}` : ""} · ${run.run_id}`;
  const done = run.target_steps ? Math.min(1, run.step / run.target_steps) : 0;
  $("#progress").className = run.tone;
  $("#progress i").style.width = `${done * 100}%`;
  $("#progress").setAttribute("aria-valuenow", Math.round(done * 100));
  const of = run.target_steps ? make("small", {}, ` of ${run.target_steps.toLocaleString("en")}`) : null;
  const facts = [
    ["step", run.counts_steps ? run.step.toLocaleString("en") : "–", of], run.reward === null ? ["loss", short(run.loss)] : ["reward", short(run.reward)],
    ["goodput", share(run.goodput)], ["time left", duration(run.remaining_seconds)], ["per step", duration(run.step_seconds)],
    ["faults", run.incidents.length, run.attempts > 1 ? make("small", {}, ` in ${run.attempts} attempts`) : null], ["wall time", duration(run.wall_seconds)],
  ];
  when("facts", facts.map(fact => [fact[0], fact[1], fact[2] && fact[2].textContent]), () =>
    $("#facts").replaceChildren(...facts.map(([name, value, more]) => make("div", {}, make("dt", {}, name), make("dd", {}, value, more)))));
  showRanks(run);
  showMemory(run);
  when("incidents", run.incidents, showIncidents);
  $("#checkpoints").hidden = !run.checkpoints.length && run.snapshot_step === null;
  showCheckpoints(run);
}

function showRanks(run) {
  $("#lanes").hidden = !run.ranks.length && !state.lanes.size;
  $(".ranks").hidden = !run.ranks.length;
  table($(".ranks"), ["rank", "#step", "phase", "#for", "#after the first?", "state?", "#pid?"], run.ranks.map(rank => ({
    cells: rank.observable ? [
      rank.rank, rank.step, rank.awaited ? { late: true, text: `${rank.phase}: the others wait` } : rank.phase + (rank.waits ? ", waits" : ""),
      duration(rank.phase_seconds), rank.late_seconds === null ? "behind" : rank.late_seconds ? `+${duration(rank.late_seconds)}` : "first",
      rank.state, rank.pid] : [`local ${rank.local_rank}`, "–", rank.phase, "–", "–", "–", "–"],
  })));
  when("late", [...run.hosts, ...run.late_ranks], late => $(".notes").replaceChildren(...late.map(text => make("li", {}, text))));
}

function showMemory(run) {
  const measured = run.ranks.filter(rank => rank.memory);
  $("#memory").hidden = !measured.length;
  if (!measured.length) return;
  const most = Math.max(...measured.flatMap(({ memory: m }) => [m.peak_bytes, m.now_bytes, m.capacity_bytes || 0]));
  when("memory", [measured.map(rank => [rank.rank, rank.memory]), most], () => $(".bars").replaceChildren(...measured.map(({ rank, memory: m }) => {
    const mark = (name, value, line) => {
      if (!value) return null;
      const made = make("i", { class: name, title: `${name === "top" ? "limit" : name}: ${bytes(value)}` });
      made.style[line ? "left" : "width"] = `${Math.min(99.7, value / most * 100)}%`;
      return made;
    };
    const texts = [`now ${bytes(m.now_bytes)}`, `peak ${bytes(m.peak_bytes)}`, m.capacity_bytes && `limit ${bytes(m.capacity_bytes)}`];
    return make("div", { class: "bar" }, `rank ${rank}`,
      make("div", {}, mark("peak", m.peak_bytes), mark("now", m.now_bytes), mark("top", m.capacity_bytes, true)),
      make("span", {}, texts.filter(Boolean).join(" · ")));
  })));
  const host = run.host_memory && `${share(run.host_memory.fraction)} of ${run.host_memory.name} in use.`;
  const where = measured[0].memory.where === "device" ? "Memory of the devices: bright is now, pale the peak." : "No device: memory of the processes, shared memory included.";
  $("#memory .lead").textContent = [where, host, ...run.facts].filter(Boolean).join(" ");
}

function showIncidents(incidents) {
  $("#incidents").hidden = !incidents.length;
  $("#incidents ol").replaceChildren(...incidents.map(one => {
    const facts = [`after step ${one.step}`, one.cause, one.detection_seconds !== null && `detected in ${duration(one.detection_seconds)}`, one.action,
      one.recovery_seconds !== null ? `recovered in ${duration(one.recovery_seconds)}` : one.gave_up ? "gave up" : state.run.live ? "not recovered yet" : "not recovered",
      one.repeated_steps && `${one.repeated_steps} step${one.repeated_steps > 1 ? "s" : ""} redone`, one.at && new Date(one.at * 1000).toLocaleTimeString()];
    const link = one.folder && make("a", { href: `incident/${state.key}/${parseInt(one.folder, 10)}`, target: "_blank", rel: "noopener" }, "report");
    return make("li", {}, make("b", {}, one.number), make("div", {}, make("p", {}, one.sentence), make("p", {}, facts.filter(Boolean).join(" · "))), link);
  }));
}

function showCheckpoints(run) {
  const rows = [...run.checkpoints].reverse();
  const element = $("#checkpoints table");
  element.hidden = !rows.length;
  table(element, ["#step", "#age", "verified", "path?"], rows.map(one => ({
    cells: [one.step, ago(one.at), one.verified ? "yes" : "no", make("code", {}, one.path)] })));
  $("#checkpoints .lead").textContent = run.snapshot_step === null ? "" : `Newest snapshot in memory: step ${run.snapshot_step}.`;
}

function showCurves() {
  const names = Object.keys(TITLES).filter(name => state.curves[name]?.length);
  $("#curves").hidden = !names.length;
  const box = $(".charts");
  box.dataset.count = names.length;
  const faults = (state.run?.incidents || []).filter(one => one.train_call === state.run.train_call);
  for (const old of box.children) if (!names.includes(old.dataset.name)) old.remove();
  for (const name of names) {
    let figure = [...box.children].find(child => child.dataset.name === name);
    if (!figure) {
      figure = make("figure", {}, make("figcaption", {}, TITLES[name], make("span", {})), shape("svg", { role: "img", "aria-label": TITLES[name] }));
      figure.dataset.name = name;
      box.append(figure);
    }
    const points = state.curves[name], last = points.at(-1);
    const say = point => {
      $("span", figure).textContent = point ? `step ${point[0].toLocaleString("en")}: ${short(point[1])}` + (point[2] < point[3] ? ` (${short(point[2])} to ${short(point[3])})` : "") : short(last[1]);
    };
    drawCurve($("svg", figure), points, faults, `var(--${name})`, say);
    say(null);
  }
}

function addLanes({ now, ranks }, whole) {
  if (whole) state.lanes.clear();
  for (const [rank, spans] of Object.entries(ranks)) {
    const key = isNaN(rank) ? rank : +rank;
    const lane = state.lanes.get(key) || state.lanes.set(key, new Map()).get(key);
    for (const [phase, begin, end] of spans) lane.set(begin, [OUTSIDE[phase] || phase, begin, end]);
    for (const [begin, span] of lane) if (span[2] !== null && span[2] < now - KEPT_SECONDS) lane.delete(begin);
  }
  state.now = now;
  state.at = performance.now();
  const present = PHASES.filter(phase => [...state.lanes.values()].some(lane => [...lane.values()].some(span => span[0] === phase)));
  when("legend", present, () => $(".legend").replaceChildren(...present.map(phase => {
    const swatch = make("i");
    swatch.style.background = phaseColor(phase);
    return make("li", {}, swatch, phase.replace("forward_", "forward and ").replace("_", " "));
  })));
}

const phaseColor = phase => css({ reward: "--reward-phase", alarm: "--bad" }[phase] || `--${phase}`) || css("--startup");

function redrawLanes() {
  if (!state.lanes.size) return;
  const live = Boolean(state.run?.live && state.run.ranks.length);
  const marks = new Map((state.run?.ranks || []).filter(rank => rank.awaited || rank.waits).map(rank => [rank.rank, rank.awaited ? "awaited" : "waits"]));
  const now = state.now + (live ? Math.min(1, (performance.now() - state.at) / 1000) : 0);
  drawLanes($("canvas"), state.lanes, { now, seconds: state.seconds, color: phaseColor, marks, ended: !live });
}

function showSamples(groups) {
  $("#samples").hidden = !groups.length;
  const open = new Set([...document.querySelectorAll("#samples details[open]")].map(one => one.dataset.key));
  $("#samples > div").replaceChildren(...groups.map(group => {
    const totals = group.completions.map(one => Object.values(one.rewards).reduce((sum, value) => sum + (value || 0), 0));
    const mean = totals.reduce((sum, value) => sum + value, 0) / totals.length;
    const made = make("details", {}, make("summary", {}, make("span", {}, `step ${group.step}`), make("span", { class: "text" }, group.prompt),
      make("span", {}, `${group.completions.length} completions · sum of rewards ${short(mean)} on average`)),
      make("div", { class: "text" }, group.prompt),
      ...group.completions.map((one, at) => make("div", { class: "completion" }, make("p", {}, make("b", {}, short(totals[at])), " · ",
        Object.entries(one.rewards).map(([name, value]) => `${name} ${short(value)}`).join(" · "), ` · ${one.tokens} tokens`, one.ended && ` · ended by ${one.ended}`),
      make("div", { class: "text" }, one.text))));
    made.dataset.key = `${group.train_call}/${group.step}/${group.group}`;
    made.open = open.has(made.dataset.key);
    return made;
  }));
}

function showRuns({ runs, default: first }) {
  state.runs = runs;
  if (state.follows && state.key && state.key !== first) return show(first);
  state.key = state.key || first;
  const name = run => run.run_id + (runs.filter(other => other.run_id === run.run_id).length > 1 ? ` (${run.key.slice(0, 4)})` : "");
  when("select", runs.map(run => [run.key, run.run_id]), () =>
    $("#runs").replaceChildren(...runs.map(run => make("option", { value: run.key, selected: run.key === state.key }, name(run)))));
  table($("#all table"), ["run", "state", "#step", "#faults?", "#last event?"], runs.map(run => {
    const link = make("a", { href: `?run=${run.key}` }, name(run));
    link.onclick = event => { event.preventDefault(); choose(run.key); };
    return { current: run.key === state.key, cells: [link, run.state || "not read yet",
      run.step === undefined ? "–" : `${run.step}${run.target_steps ? ` of ${run.target_steps}` : ""}`, run.faults ?? "–", ago(run.last_event_at)] };
  }));
}

let source = null;

function connect() {
  source?.close();
  source = new EventSource(`events${state.key ? `?run=${state.key}` : ""}`);
  let whole = true;
  const on = (name, take) => source.addEventListener(name, event => {
    state.heard = Date.now();
    take(JSON.parse(event.data));
  });
  source.onopen = () => { whole = true; state.heard = Date.now(); };
  on("runs", showRuns);
  on("run", run => { showRun(run); showCurves(); redrawLanes(); sayConnection(); });
  on("curves", ({ from, points }) => {
    for (const [name, added] of Object.entries(points)) state.curves[name] = [...(state.curves[name] || []).slice(0, from[name]), ...added];
    for (const name of Object.keys(state.curves)) if (!(name in points)) delete state.curves[name];
    showCurves();
  });
  on("lanes", lanes => { addLanes(lanes, whole); whole = false; redrawLanes(); });
  on("samples", showSamples);
  on("problem", problem => { $("#verdict").className = "bad"; $("h1").textContent = problem; });
}

function choose(key) {
  state.follows = false;
  history.replaceState(null, "", `?run=${key}`);
  show(key);
}

function show(key) {
  Object.assign(state, { key, run: null, curves: {}, shown: {} });
  state.lanes.clear();
  $("#samples").hidden = true;
  $("#runs").value = key;
  $("h1").textContent = "Reading the run";
  connect();
  scrollTo(0, 0);
}

function move(by) {
  const at = state.runs.findIndex(run => run.key === state.key) + by;
  if (state.runs[at]) choose(state.runs[at].key);
}

const KEYS = {
  j: () => move(1), k: () => move(-1), g: () => scrollTo(0, 0), i: () => $("#incidents h2").scrollIntoView(), c: () => $("#samples h2").scrollIntoView(),
  "+": () => { state.seconds = Math.max(10, state.seconds / 2); redrawLanes(); }, "-": () => { state.seconds = Math.min(KEPT_SECONDS, state.seconds * 2); redrawLanes(); },
};
addEventListener("keydown", event => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("select, input")) return;
  KEYS[event.key]?.();
});
$("#runs").onchange = event => choose(event.target.value);
new ResizeObserver(() => { showCurves(); redrawLanes(); }).observe(document.body);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { state.shown.legend = ""; redrawLanes(); });
function sayConnection() {
  const lost = source.readyState !== EventSource.OPEN;
  $("#connection").className = lost ? "lost" : "";
  $("#connection").textContent = lost ? `not connected for ${duration((Date.now() - (state.heard || Date.now())) / 1000)}: what is shown may be old`
    : state.run?.live ? "live" : "connected";
  if (state.run) showCheckpoints(state.run);
}

setInterval(sayConnection, 1000);
setInterval(redrawLanes, 250);
state.key = new URLSearchParams(location.search).get("run") || "";
state.follows = !state.key;
connect();
