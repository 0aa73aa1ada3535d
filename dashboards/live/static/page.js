// The live page: shows what the server sends. All texts are put in as text, never as markup.
"use strict";

const PHASES = ["data", "generate", "reward", "score", "forward_backward", "optimizer", "vote", "checkpoint", "eval",
  "cleanup", "weight_sync", "callback", "startup", "idle", "unknown"];
const COLORS = 8, DASHES = ["", "6 3", "2 3", "8 3 2 3"], MOST_LOG_LINES = 4000, OPEN_SAMPLES = 5, SILENT_SECONDS = 45;
const ENDED = ["finished", "failed", "stopped", "unknown", "unreadable", undefined, null];
const OUTSIDE = { starting: "startup", training: "idle", between: "idle", returned: "idle", done: "idle", absent: "unknown", failed: "unknown" };
const KEPT_SECONDS = 600;
const $ = (selector, root = document) => root.querySelector(selector);
const state = { run: null, runs: [], key: "", layout: [], curves: {}, others: new Map(), hidden: new Set(), lanes: new Map(), now: 0, at: 0, seconds: 60, shown: {}, heard: 0 };

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
    $("#facts").replaceChildren(...facts.map(([name, value, more]) => make("div", { class: name.replace(" ", "_") }, make("dt", {}, name), make("dd", {}, value, more)))));
  when("advice", run.advice, advice => $("#advice").replaceChildren(...advice.map(text => make("li", {}, text))));
  $("#advice").hidden = !run.advice.length;
  showRanks(run);
  showMemory(run);
  when("incidents", run.incidents, showIncidents);
  $("#checkpoints").hidden = !run.checkpoints.length && run.snapshot_step === null;
  showCheckpoints(run);
}

function showRanks(run) {
  $("#lanes").hidden = !run.ranks.length && !state.lanes.size;
  $(".ranks").hidden = !run.ranks.length;
  table($(".ranks"), ["rank", "#step", "phase", "#for", "#after the first", "state?", "#pid?"], run.ranks.map(rank => ({
    cells: rank.observable ? [
      rank.rank, rank.step, rank.awaited ? { late: true, text: `${rank.phase}: the others wait` } : rank.phase + (rank.waits ? ", waits" : ""),
      duration(rank.phase_seconds), rank.late_seconds === null ? "behind" : rank.late_seconds ? `+${duration(rank.late_seconds)}` : "first",
      rank.state, rank.pid] : [`local ${rank.local_rank}`, "–", rank.phase, "–", "–", "–", "–"],
  })));
  when("hosts", run.hosts, hosts => $(".notes").replaceChildren(...hosts.map(text => make("li", {}, text))));
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
  $("#incidents summary span").textContent = incidents.length;
  $("#incidents ol").replaceChildren(...incidents.map(one => {
    const facts = [`after step ${one.step}`, one.cause, one.detection_seconds !== null && `detected in ${duration(one.detection_seconds)}`, one.action,
      one.recovery_seconds !== null ? `recovered in ${duration(one.recovery_seconds)}` : one.gave_up ? "gave up" : state.run.live ? "not recovered yet" : "not recovered",
      one.repeated_steps && `${one.repeated_steps} step${one.repeated_steps > 1 ? "s" : ""} redone`, one.at && new Date(one.at * 1000).toLocaleTimeString()];
    const link = one.folder && make("a", { href: `incident/${state.key}/${parseInt(one.folder, 10)}`, target: "_blank", rel: "noopener" }, "report");
    const log = make("a", { href: "#log", title: "the output of the rank before the fault" }, "log");
    log.onclick = event => { event.preventDefault(); openLog({ rank: one.rank ?? "", attempt: one.attempt, fault: one.number }); };
    return make("li", {}, make("b", {}, one.number), make("div", {}, make("p", {}, one.sentence), make("p", {}, facts.filter(Boolean).join(" · "))),
      make("span", {}, link, " ", log));
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

const nameOf = key => state.runs.find(run => run.key === key)?.run_id || key.slice(0, 4);
const color = at => `var(--line${at % COLORS})`;
const say = (value, unit, digits) => unit === "bytes" ? bytes(value) : unit === "ratio" ? share(value) : short(value, digits) + ({ seconds: " s", celsius: " °C" }[unit] || "");

function showCurves() {
  const runs = [[state.key, state.curves], ...state.others].filter(([key], at) => !at || key !== state.key);
  const every = runs.flatMap(([, curves]) => Object.values(curves)).filter(points => points.length);
  $("#curves").hidden = !every.length;
  if (!every.length) return;
  const first = Math.min(...every.map(points => points[0][0]));
  const own = list => (list || []).filter(one => [null, state.run.train_call].includes(one.train_call));
  const marks = { faults: own(state.run?.incidents), saved: own(state.run?.checkpoints).map(one => one.step), weight: +$("#smoothing").value,
    range: [first, Math.max(first + 1, ...every.map(points => points.at(-1)[0]))] };
  const many = runs.length > 1;
  when("compared", runs.map(([key]) => key), () => $(".compared").replaceChildren(...(many ? runs : []).map(([key], at) => make("li", {}, swatch(at), nameOf(key)))));
  for (const group of document.querySelectorAll("#curves details")) {
    const box = $(".charts", group);
    const charts = state.layout.filter(chart => chart.group === group.dataset.group).map(chart => [chart, runs.flatMap(([, curves], run) =>
      Object.entries(curves).filter(([key, points]) => key.split("/")[0] === chart.key && points.length).map(([key, points], at) =>
        ({ points, label: key.slice(chart.key.length + 1), at: many ? run : at, color: color(many ? run : at), dash: many ? DASHES[at % DASHES.length] : "" })))])
      .filter(([, lines]) => lines.length);
    group.hidden = !charts.length;
    for (const old of [...box.children]) if (!charts.some(([chart]) => chart.key === old.dataset.name)) old.remove();
    charts.forEach(([chart, lines], at) => {
      let figure = [...box.children].find(child => child.dataset.name === chart.key);
      if (!figure) {
        figure = make("figure", {}, make("figcaption", {}, chart.title, make("span", {})), shape("svg", { role: "img", "aria-label": chart.title }), make("p", {}));
        figure.dataset.name = chart.key;
        box.insertBefore(figure, box.children[at] || null);
      }
      const named = lines.length > 1 || lines[0].label, values = lines.map(() => make("b", {}));
      $("p", figure).replaceChildren(...(named ? lines.map((line, at) => make("span", {}, swatch(line.at), line.label || (lines.length > runs.length ? "all" : ""), " ", values[at])) : []));
      if (group.open) drawCurves($("svg", figure), lines, { ...marks, text: (value, digits) => say(value, chart.unit, digits), say: (step, points) => {
        const [point] = points, value = say(point[1], chart.unit) + (step !== null && point[2] < point[3] ? ` (${short(point[2])} to ${short(point[3])})` : "");
        $("figcaption span", figure).textContent = [step === null ? "" : `step ${point[0].toLocaleString("en")}`, named ? "" : value].filter(Boolean).join(": ");
        points.forEach((point, at) => { values[at].textContent = say(point[1], chart.unit); });
      } });
    });
  }
}

function swatch(at) {
  const made = make("i");
  made.style.background = color(at);
  return made;
}

// The curves of the runs that are drawn over the chosen one; they are read while they are drawn.
async function readOthers() {
  for (const key of state.others.keys()) {
    const answer = await fetch(`curves/${key}`).catch(() => null);
    if (answer?.ok && state.others.has(key)) state.others.set(key, await answer.json());
  }
  if (state.others.size) showCurves();
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
  when("legend", present, () => $(".phases").replaceChildren(...present.map(phase => {
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
  if (groups.length && $("#samples").hidden && $("#incidents").hidden && $("#samples").name === "read") $("#samples").open = true;
  $("#samples").hidden = !groups.length;
  const open = new Set([...document.querySelectorAll("#samples details[open]")].map(one => one.dataset.key));
  const prompts = new Map();
  for (const group of groups) {
    const known = prompts.get(group.prompt) || prompts.set(group.prompt, { step: group.step, all: [] }).get(group.prompt);
    known.all.push(...group.completions.map(one => ({ ...one, step: group.step, total: Object.values(one.rewards).reduce((sum, value) => sum + (value || 0), 0) })));
  }
  $("#samples > summary span").textContent = `of ${prompts.size} prompt${prompts.size > 1 ? "s" : ""}`;
  $("#samples > div").replaceChildren(...[...prompts].map(([prompt, { step, all }]) => {
    all.sort((a, b) => b.total - a.total);
    if (all.length > 2) all.splice(1, 0, all.pop());  // best, worst, the others
    const cards = all.map((one, at) => make("div", { class: "completion" }, make("p", {}, make("b", {}, short(one.total)), all.length > 1 ? [" best", " worst"][at] : "", ` · step ${one.step} · `,
      Object.entries(one.rewards).map(([name, value]) => `${name} ${short(value)}`).join(" · "), ` · ${one.tokens} tokens`, one.ended && ` · ended by ${one.ended}`),
    make("div", { class: "text" }, one.text)));
    const made = make("details", {}, make("summary", {}, make("span", {}, `step ${step}`), make("span", { class: "text" }, prompt),
      make("span", {}, `${all.length} completions, sum of rewards ${short(all[0].total)} to ${short((all[1] || all[0]).total)}`)),
    make("div", { class: "text" }, prompt), ...cards.slice(0, 2), cards.length > 2 ? make("details", {}, make("summary", {}, `${cards.length - 2} more`), ...cards.slice(2)) : null);
    [made, ...made.querySelectorAll("details")].forEach((one, at) => { one.dataset.key = `${at}${prompt}`; one.open = open.has(one.dataset.key); });
    made.ontoggle = () => {
      const others = [...document.querySelectorAll("#samples > div > details[open]")].filter(one => one !== made);
      if (made.open) others.slice(OPEN_SAMPLES - 1).forEach(one => { one.open = false; });
    };
    return made;
  }));
}

let log = null;

// asked: {rank, attempt, find, fault}; with a fault, its line is looked for.
function openLog(asked = {}) {
  const output = $(".output"), panel = $("#log");
  log?.close();
  panel.open = true;
  if (asked.fault) panel.scrollIntoView();
  $("#log .about").textContent = asked.find ? `lines with “${asked.find}”` : asked.fault ? `${asked.rank === "" ? "all ranks" : `rank ${asked.rank}`} of attempt ${asked.attempt}, before fault ${asked.fault}` : "";
  log = new EventSource(`log/${state.key}?${new URLSearchParams(asked)}`);
  log.onopen = () => { output.replaceChildren(); state.hidden.clear(); $(".ranks-shown").replaceChildren(); };
  log.addEventListener("end", () => {
    log.close();
    if (!output.children.length) output.textContent = "Nothing was printed, or it is not kept.";
  });
  log.addEventListener("lines", event => {
    const made = JSON.parse(event.data).map(([attempt, rank, descriptor, text]) => {
      const line = make("div", { hidden: state.hidden.has(rank), title: `attempt ${attempt}` }, make("b", { class: `rank${rank % COLORS}` }, rank), " ", text);
      Object.assign(line.dataset, { rank, attempt });
      if (descriptor === 2) line.className = "error";
      return line;
    });
    output.append(...made);
    while (output.children.length > MOST_LOG_LINES) output.firstChild.remove();
    for (const rank of new Set(made.map(line => line.dataset.rank))) if (!$(`.ranks-shown [value="${rank}"]`)) addRank(rank, output);
    const last = pattern => [...output.children].findLast(line => pattern.test(line.textContent));
    const fault = asked.fault && (last(/Traceback \(most recent/) || last(/error|exception|killed|fatal|abort/i) || output.lastChild);
    $(".here", output)?.classList.remove("here");
    fault?.classList.add("here");
    if (fault) output.scrollTop = fault.offsetTop - output.offsetTop - output.clientHeight / 3;
    else if ($("#log label input").checked) output.scrollTop = output.scrollHeight;
  });
}

function addRank(rank, output) {
  const button = make("button", { value: rank, class: `rank${rank % COLORS}` }, `rank ${rank}`);
  button.setAttribute("aria-pressed", "true");
  button.onclick = () => {
    const hides = !state.hidden.delete(+rank);
    if (hides) state.hidden.add(+rank);
    button.setAttribute("aria-pressed", String(!hides));
    for (const line of output.children) if (line.dataset.rank === rank) line.hidden = hides;
  };
  $(".ranks-shown").append(button);
}

async function showValues() {
  if (!$("#values").open) return;
  const answer = await fetch(`values/${state.key}`).catch(() => null);
  if (!answer?.ok) return;
  const { rows, empty } = await answer.json();
  const unit = row => row.unit === "bytes" || row.unit === "ratio" || row.unit === "seconds" ? row.unit : "";
  table($("#values table"), ["metric", "values", "shown as"], rows.map(row => ({ cells: [make("code", { title: row.help }, row.name),
    row.values.map(([label, value]) => (label ? `${label}: ` : "") + say(value, unit(row))).join(" · ") + (row.more ? ` · ${row.more} more` : ""),
    row.chart ? `chart “${row.chart}”` : row.why] })));
  $("#values .lead").replaceChildren("No value here, because nothing of the kind has been measured, or only the supervisor knows it, which serves it at /metrics: ",
    ...empty.flatMap(row => [make("code", { title: row.help }, row.name), " "]));
}

function showRuns({ runs, default: first }) {
  state.runs = runs;
  if (state.follows && state.key && state.key !== first) return show(first);
  state.key = state.key || first;
  const name = run => run.run_id + (runs.filter(other => other.run_id === run.run_id).length > 1 ? ` (${run.key.slice(0, 4)})` : "");
  const link = run => {
    const made = make("a", { href: `?run=${run.key}` }, name(run));
    made.onclick = event => { event.preventDefault(); choose(run.key); };
    return made;
  };
  when("select", runs.map(run => [run.key, run.run_id]), () =>
    $("#runs").replaceChildren(...runs.map(run => make("option", { value: run.key, selected: run.key === state.key }, name(run)))));
  const active = runs.filter(run => run.key !== state.key && !ENDED.includes(run.state));
  const ended = ENDED.includes(runs.find(run => run.key === state.key)?.state);
  $(".other").replaceChildren(...(ended ? active.slice(0, 3).flatMap(run => [link(run), ` is ${run.state} now. `]) : []));
  when("list", [runs, state.key, [...state.others.keys()]], () => $("#all ul").replaceChildren(...runs.map(run => {
    const tick = make("input", { type: "checkbox", checked: run.key === state.key || state.others.has(run.key), disabled: run.key === state.key, title: "draw over the chosen run" });
    tick.setAttribute("aria-label", `draw ${run.run_id}`);
    tick.onchange = () => {
      tick.checked ? state.others.set(run.key, {}) : state.others.delete(run.key);
      tick.checked ? readOthers() : showCurves();
    };
    const of = run.step === undefined ? "" : ` · ${run.step}${run.target_steps ? ` of ${run.target_steps}` : ""}`;
    const item = make("li", {}, tick, make("div", {}, link(run), make("small", {}, (run.state || "not read yet") + of + (run.faults ? ` · ${run.faults} fault${run.faults > 1 ? "s" : ""}` : ""))));
    if (run.key === state.key) item.setAttribute("aria-current", "true");
    return item;
  })));
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
  // the server has refused: it is full, or the run is gone
  source.onerror = () => { if (source.readyState === EventSource.CLOSED) setTimeout(() => state.follows ? show("") : connect(), 2000); };
  on("runs", showRuns);
  on("run", run => { showRun(run); showCurves(); redrawLanes(); sayConnection(); });
  on("alive", () => {});
  on("layout", layout => { state.layout = layout; showCurves(); });
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
  state.others.delete(key);
  log?.close();
  log = null;
  $("#samples").hidden = true;
  $("#runs").value = key;
  $("h1").textContent = "Reading the run";
  connect();
  if ($("#log").open) openLog();
  showValues();
  scrollTo(0, 0);
}

function move(by) {
  const at = state.runs.findIndex(run => run.key === state.key) + by;
  if (state.runs[at]) choose(state.runs[at].key);
}

function unfold(selector) {
  $(selector).open = true;
  $(selector).scrollIntoView();
}

const KEYS = {
  j: () => move(1), k: () => move(-1), g: () => scrollTo(0, 0), i: () => unfold("#incidents"), c: () => unfold("#samples"), l: () => unfold("#log"),
  "+": () => { state.seconds = Math.max(10, state.seconds / 2); redrawLanes(); }, "-": () => { state.seconds = Math.min(KEPT_SECONDS, state.seconds * 2); redrawLanes(); },
};
addEventListener("keydown", event => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("select, input")) return;
  KEYS[event.key]?.();
});
$("#runs").onchange = event => choose(event.target.value);
new ResizeObserver(() => { showCurves(); redrawLanes(); }).observe(document.body);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { state.shown.legend = ""; redrawLanes(); });
$("#smoothing").onchange = showCurves;
const narrow = matchMedia("(max-width: 40rem)").matches;
for (const group of document.querySelectorAll("#curves details")) {
  group.open = group.dataset.group === "learning" || !narrow;
  group.ontoggle = showCurves;
}
// Of the parts with one name only one is open, so that nothing is far away; on a phone, of all parts and charts.
for (const one of document.querySelectorAll("main > details, #curves details")) one.name = narrow ? "page" : one.dataset.set || "";
$("#log").ontoggle = event => {
  if (event.target.open && !log) openLog();
  if (!event.target.open) { log?.close(); log = null; }
};
$("#log input[type=search]").onchange = event => openLog(event.target.value ? { find: event.target.value } : {});
$("#values").ontoggle = showValues;
$("#lanes").ontoggle = redrawLanes;
for (const link of document.querySelectorAll("nav a")) link.onclick = () => { $(link.hash).open = true; };

function sayConnection() {
  // a machine that has slept does not see that its connection is gone
  if (Date.now() - state.heard > SILENT_SECONDS * 1000 && source.readyState === EventSource.OPEN) connect();
  const lost = source.readyState !== EventSource.OPEN;
  $("#connection").className = lost ? "lost" : "";
  $("#connection").textContent = lost ? `not connected for ${duration((Date.now() - (state.heard || Date.now())) / 1000)}: what is shown may be old`
    : state.run?.live ? "live" : "connected";
  if (state.run) showCheckpoints(state.run);
}

setInterval(sayConnection, 1000);
setInterval(() => { readOthers(); showValues(); }, 5000);
setInterval(redrawLanes, 250);
state.key = new URLSearchParams(location.search).get("run") || "";
state.follows = !state.key;
connect();
