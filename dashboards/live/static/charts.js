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

function short(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size >= 1e6) return `${+(value / 1e6).toPrecision(3)} M`;
  if (size >= 1e4) return `${+(value / 1e3).toPrecision(3)} k`;
  if (size && size < 1e-3) return value.toExponential(1);
  return String(+value.toPrecision(size >= 1000 ? 4 : 3));
}

// points: [step, mean, lowest, highest]; faults: [{number, step, from_checkpoint, lost_steps}].
function drawCurve(svg, points, faults, color, readout) {
  const width = svg.clientWidth || 480, height = svg.clientHeight || 176;
  const left = 38, right = 6, top = 16, bottom = 20;
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.replaceChildren();
  const first = points[0][0], last = Math.max(points.at(-1)[0], first + 1);
  let low = Infinity, high = -Infinity;
  for (const point of points) { low = Math.min(low, point[2]); high = Math.max(high, point[3]); }
  if (low >= 0 && low < high * .5) low = 0;
  if (low === high) { low -= Math.abs(low) * .1 || .5; high += Math.abs(high) * .1 || .5; }
  const x = step => left + (step - first) / (last - first) * (width - left - right);
  const y = value => height - bottom - (value - low) / (high - low) * (height - top - bottom);
  for (const value of ticks(low, high, 3)) {
    svg.append(shape("line", { class: "grid", x1: left, x2: width - right, y1: y(value), y2: y(value) }));
    svg.append(shape("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, short(value)));
  }
  for (const step of ticks(first, last, Math.max(2, width / 75)).filter(Number.isInteger)) {
    svg.append(shape("text", { x: x(step), y: height - 4, "text-anchor": x(step) > width - 30 ? "end" : "middle" }, step.toLocaleString("en")));
  }
  let labelled = -Infinity;
  for (const fault of [...faults].sort((a, b) => a.step - b.step)) {
    const at = Math.min(Math.max(fault.step, first), last);
    if (fault.lost_steps) {
      const from = Math.max(first, fault.step - fault.lost_steps);
      svg.append(shape("rect", { class: "redone", x: x(from), width: Math.max(3, x(at) - x(from)), y: top, height: height - top - bottom }));
    }
    svg.append(shape("line", { class: "fault", x1: x(at), x2: x(at), y1: top, y2: height - bottom }));
    if (x(at) - labelled > 16) {
      svg.append(shape("text", { class: "fault", x: x(at), y: top - 4, "text-anchor": "middle" }, fault.number));
      labelled = x(at);
    }
  }
  const path = at => points.map(point => `${x(point[0]).toFixed(1)} ${y(point[at]).toFixed(1)}`).join("L");
  const lowest = [...points].reverse().map(point => `${x(point[0]).toFixed(1)} ${y(point[2]).toFixed(1)}`).join("L");
  svg.append(shape("path", { class: "band", d: `M${path(3)}L${lowest}Z` }), shape("path", { class: "line", d: `M${path(1)}` }));
  for (const drawn of svg.querySelectorAll("path")) drawn.style[drawn.matches(".line") ? "stroke" : "fill"] = color;
  const cursor = shape("line", { class: "cursor", y1: top, y2: height - bottom, visibility: "hidden" });
  svg.append(cursor);
  svg.onpointermove = event => {
    const step = first + (event.offsetX - left) / (width - left - right) * (last - first);
    const near = points.reduce((best, point) => Math.abs(point[0] - step) < Math.abs(best[0] - step) ? point : best);
    for (const end of ["x1", "x2"]) cursor.setAttribute(end, x(near[0]));
    cursor.setAttribute("visibility", "visible");
    readout(near);
  };
  svg.onpointerleave = () => { cursor.setAttribute("visibility", "hidden"); readout(null); };
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
