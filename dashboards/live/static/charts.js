// Draws curves as SVG and the phases of ranks on a canvas. Knows nothing of the server.
"use strict";

const SVG = "http://www.w3.org/2000/svg";

function shape(name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

// About `count` round numbers from `low` to `high`.
function ticks(low, high, count) {
  const raw = (high - low || Math.abs(high) || 1) / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  const size = [1, 2, 5, 10].map(n => n * power).find(n => n >= raw);
  const found = [];
  for (let at = Math.ceil(low / size - 1e-9); at * size <= high + size * 1e-9; at++) found.push(+(at * size).toPrecision(12));
  return found;
}

function short(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size >= 1e6) return `${+(value / 1e6).toPrecision(3)} M`;
  if (size >= 1e4) return `${+(value / 1e3).toPrecision(3)} k`;
  if (size && size < 1e-3) return value.toExponential(1);
  return String(+value.toPrecision(size >= 1000 ? Math.max(4, digits) : digits));
}

// The charts that are on the page, by their svg: how to move their cursor to a step.
const cursors = new Map();
let cursorStep = null;

function moveCursors(step) {
  cursorStep = step;
  for (const [svg, move] of cursors) svg.isConnected ? move(step) : cursors.delete(svg);
}

// The exponential moving average of the means; `weight` is what stays of the past, from 0 to below 1.
function smooth(points, weight) {
  let sum = 0, scale = 0;
  return points.map(([step, mean]) => [step, (sum = sum * weight + mean * (1 - weight)) / (scale = scale * weight + 1 - weight)]);
}

// lines: [{points: [[step, mean, lowest, highest]], color, dash}]; faults: [{number, step, repeated_steps}]; saved: steps;
// range: [first, last step] of all charts, which share one cursor; say(step or null, the point of each line there, or the last).
function drawCurves(svg, lines, { faults, saved, range, weight, text, say }) {
  const width = svg.clientWidth || 240, height = svg.clientHeight || 88;
  const left = 40, right = 4, top = 11, bottom = 14, [first, last] = range;
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.replaceChildren();
  let low = Infinity, high = -Infinity;
  for (const { points } of lines) for (const point of points) { low = Math.min(low, point[2]); high = Math.max(high, point[3]); }
  if (low >= 0 && low < high * .5) low = 0;
  if (low === high) { low -= Math.abs(low) * .1; high += Math.abs(high) * .1 || 1; }
  const digits = high - low < Math.abs(high) * .02 ? 5 : 3;
  const x = step => left + (step - first) / (last - first) * (width - left - right);
  const y = value => height - bottom - (value - low) / (high - low) * (height - top - bottom);
  const add = (name, attributes, content) => svg.appendChild(shape(name, attributes, content));
  for (const value of ticks(low, high, 3)) {
    add("line", { class: "grid", x1: left, x2: width - right, y1: y(value), y2: y(value) });
    add("text", { x: left - 5, y: y(value) + 4, "text-anchor": "end" }, text(value, digits));
  }
  add("text", { x: left, y: height - 2 }, first.toLocaleString("en"));
  add("text", { x: width - right, y: height - 2, "text-anchor": "end" }, last.toLocaleString("en"));
  let labelled = -Infinity;
  for (const fault of [...faults].sort((a, b) => a.step - b.step)) {
    const at = Math.min(Math.max(fault.step, first), last);
    if (fault.repeated_steps) {
      const from = Math.max(first, fault.step - fault.repeated_steps);
      add("rect", { class: "redone", x: x(from), width: Math.max(3, x(at) - x(from)), y: top, height: height - top - bottom });
    }
    add("line", { class: "fault", x1: x(at), x2: x(at), y1: top, y2: height - bottom });
    if (x(at) - labelled > 16) add("text", { class: "fault", x: labelled = x(at), y: top - 2, "text-anchor": "middle" }, fault.number);
  }
  for (const step of saved) if (step >= first && step <= last) add("path", { class: "saved", d: `M${x(step) - 3} ${height - bottom + 4}l3 -5l3 5Z` });
  const path = (points, at = 1) => points.map(point => `${x(point[0]).toFixed(1)} ${y(point[at]).toFixed(1)}`).join("L");
  for (const { points, color, dash } of lines) {
    const flat = points.every(point => point[2] === point[3]);
    if (!flat && !weight) add("path", { class: "band", d: `M${path(points, 3)}L${path([...points].reverse(), 2)}Z` }).style.fill = color;
    if (weight) add("path", { class: "raw", d: `M${path(points)}` }).style.stroke = color;
    const line = add("path", { class: "line", d: `M${path(weight ? smooth(points, weight) : points)}` });
    line.style.stroke = color;
    if (dash) line.style.strokeDasharray = dash;
    if (points.length === 1) add("circle", { cx: x(points[0][0]), cy: y(points[0][1]), r: 2.5 }).style.fill = color;
  }
  const cursor = add("line", { class: "cursor", y1: top, y2: height - bottom, visibility: "hidden" });
  cursors.set(svg, step => {
    cursor.setAttribute("visibility", step === null ? "hidden" : "visible");
    for (const end of ["x1", "x2"]) if (step !== null) cursor.setAttribute(end, x(Math.min(Math.max(step, first), last)));
    const near = points => points.reduce((best, point) => Math.abs(point[0] - step) < Math.abs(best[0] - step) ? point : best);
    say(step, lines.map(({ points }) => step === null ? points.at(-1) : near(points)));
  });
  cursors.get(svg)(cursorStep);
  svg.onpointermove = event => moveCursors(Math.round(first + (event.offsetX - left) / (width - left - right) * (last - first)));
  svg.onpointerleave = () => moveCursors(null);
}

// lanes: Map of rank → Map of begin → [phase, begin, end or null]; times in seconds.
function drawLanes(canvas, lanes, { now, seconds, color, marks, ended }) {
  const ranks = [...lanes.keys()].sort((a, b) => isNaN(a) - isNaN(b) || a - b);
  const row = ranks.length > 16 ? 14 : 26, axis = 20, left = 46;
  const width = canvas.clientWidth || 900, height = ranks.length * row + axis;
  const density = window.devicePixelRatio || 1;
  canvas.style.height = `${height}px`;
  if (canvas.width !== Math.round(width * density) || canvas.height !== Math.round(height * density)) {
    canvas.width = Math.round(width * density);
    canvas.height = Math.round(height * density);
  }
  const brush = canvas.getContext("2d");
  brush.setTransform(density, 0, 0, density, 0, 0);
  brush.clearRect(0, 0, width, height);
  const x = at => left + (at - now + seconds) / seconds * (width - left);
  brush.font = `11px ${getComputedStyle(canvas).fontFamily}`;
  ranks.forEach((rank, index) => {
    const y = index * row;
    for (const [phase, begin, end] of lanes.get(rank).values()) {
      const from = Math.max(left, x(begin)), to = Math.min(width, x(end ?? now));
      if (to <= left) continue;
      brush.fillStyle = color(phase);
      brush.fillRect(from, y + 3, Math.max(.7, to - from), row - 6);
    }
    const mark = marks.get(rank);
    if (mark) {
      brush.strokeStyle = color("alarm");
      brush.lineWidth = 2;
      if (mark === "waits") brush.setLineDash([3, 3]);
      brush.strokeRect(Math.max(left, width - 60), y + 2, 59, row - 4);
      brush.setLineDash([]);
    }
    brush.fillStyle = mark === "awaited" ? color("alarm") : color("ink");
    brush.textAlign = "left";
    brush.fillText(isNaN(rank) ? rank : `rank ${rank}`, 0, y + row / 2 + 4);
  });
  brush.fillStyle = color("quiet");
  for (const back of ticks(0, seconds, 6)) {
    brush.textAlign = back === 0 ? "right" : "center";
    const text = back === 0 ? (ended ? "end" : "now") : `−${back} s`;
    if (x(now - back) > left + 14) brush.fillText(text, x(now - back), height - 4);
  }
}
