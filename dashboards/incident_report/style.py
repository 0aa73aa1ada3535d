"""How a report looks: its style sheet, and the script that draws its charts in the reader's light or dark colours.

Constants for `page.py`. Nothing is loaded from anywhere: fonts are the reader's own.
"""

from __future__ import annotations

STYLE = """
:root {
  color-scheme: light dark;
  --paper: #fbfaf8; --card: #ffffff; --ink: #1d2733; --quiet: #66727f; --rule: #e4e6e8;
  --alarm: #b3372f; --alarm-paper: #faeeec; --calm: #1f6f8b; --calm-paper: #eaf3f6; --mark: #fdf0c9;
  --text: ui-sans-serif, system-ui, -apple-system, "Segoe UI", "Helvetica Neue", "DejaVu Sans", sans-serif;
  --code: ui-monospace, "SF Mono", "Cascadia Code", Menlo, Consolas, "DejaVu Sans Mono", monospace;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #14181d; --card: #1b2026; --ink: #e4e8ec; --quiet: #95a1ad; --rule: #2e353d;
    --alarm: #ec7b70; --alarm-paper: #33201f; --calm: #71bcd6; --calm-paper: #182a32; --mark: #453a17;
  }
}
* { box-sizing: border-box; }
html { background: var(--paper); color: var(--ink); font: 16px/1.55 var(--text); }
body { margin: 0 auto; padding: 3.5rem 1.5rem 5rem; max-width: 62rem; overflow-wrap: anywhere; }
.eyebrow { color: var(--quiet); font-size: .875rem; margin: 0 0 1.1rem; }
.eyebrow span + span::before { content: "·"; margin: 0 .55em; }
h1 { font-size: clamp(1.6rem, 1.1rem + 2.1vw, 2.35rem); line-height: 1.22; letter-spacing: -.018em;
  font-weight: 680; margin: 0 0 1.4rem; text-wrap: balance; }
h2 { font-size: 1.15rem; letter-spacing: -.005em; font-weight: 650; margin: 3.2rem 0 .35rem; }
h2 + p.lead, p.lead { color: var(--quiet); margin: 0 0 1rem; font-size: .9375rem; max-width: 46rem; }
.tags { display: flex; flex-wrap: wrap; gap: .5rem; margin: 0 0 2rem; padding: 0; list-style: none; }
.tags li { font-size: .8125rem; padding: .16rem .7rem; border-radius: 99px; background: var(--calm-paper);
  color: var(--calm); font-weight: 550; }
.tags li.alarm { background: var(--alarm-paper); color: var(--alarm); }
.advice { border-left: 3px solid var(--calm); background: var(--calm-paper); border-radius: 0 8px 8px 0;
  padding: .95rem 1.25rem; margin: 0 0 2rem; }
.advice h2 { margin: 0 0 .3rem; font-size: .9375rem; color: var(--calm); }
.advice ul { margin: 0; padding-left: 1.1rem; }
.card { background: var(--card); border: 1px solid var(--rule); border-radius: 10px; overflow: hidden; }
.chart { padding: .75rem .5rem .25rem; }
dl.facts { display: grid; grid-template-columns: minmax(8.5rem, max-content) 1fr; margin: 0;
  padding: .4rem 1.25rem; }
dl.facts > * { padding: .55rem 0; border-top: 1px solid var(--rule); margin: 0; }
dl.facts > dt:first-of-type, dl.facts > dd:first-of-type { border-top: 0; }
dl.facts dt { color: var(--quiet); padding-right: 1.75rem; font-size: .9375rem; }
dl.facts ul { list-style: none; margin: 0; padding: 0; }
code, pre, td.code, th.code { font: .84375rem/1.6 var(--code); }
pre { margin: 0; padding: 1rem 1.25rem; overflow: auto; max-height: 26rem; white-space: pre; overflow-wrap: normal; }
dd pre { padding: 0; white-space: pre-wrap; max-height: none; }
.stack + .stack { margin-top: .85rem; }
.stack header { padding: .65rem 1.25rem; border-bottom: 1px solid var(--rule); font-weight: 600; }
.stack.alarm header { color: var(--alarm); }
.stack mark { background: var(--mark); color: inherit; font-weight: 650; padding: .1em .3em; margin: 0 -.3em;
  border-radius: 4px; }
.stack .where { color: var(--quiet); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .875rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; vertical-align: top; padding: .45rem 1rem; border-top: 1px solid var(--rule);
  overflow-wrap: normal; }
td.long { overflow-wrap: anywhere; min-width: 16rem; color: var(--quiet); }
th { color: var(--quiet); font-weight: 550; font-size: .8125rem; border-top: 0; white-space: nowrap; }
td.number, th.number { text-align: right; white-space: nowrap; }
td.odd { background: var(--alarm-paper); color: var(--alarm); }
td.code { white-space: nowrap; }
td.all, td.all .state { color: var(--quiet); }
td.code.all .state { display: inline; margin-left: .6rem; }
td .state { display: block; color: var(--quiet); font: .75rem/1.4 var(--text); }
td.odd .state { color: inherit; }
caption { text-align: left; padding: .7rem 1rem .5rem; color: var(--quiet); font-size: .875rem; }
details > summary { cursor: pointer; padding: .75rem 1.25rem; color: var(--quiet); }
details[open] > summary { border-bottom: 1px solid var(--rule); }
.none { color: var(--quiet); margin: 0; }
ul.missing { margin: 0; padding-left: 1.2rem; }
ul.missing li { margin: .2rem 0; }
footer { margin-top: 4rem; color: var(--quiet); font-size: .8125rem; }
.js-plotly-plot text { font-variant-numeric: tabular-nums; }
@media (max-width: 40rem) {
  body { padding: 2rem 1rem 3rem; }
  dl.facts { grid-template-columns: 1fr; }
  dl.facts > dd { border-top: 0; padding-top: 0; }
  dl.facts > dt { padding-bottom: 0; }
}
@media print { body { max-width: none; padding: 0; } pre { max-height: none; } .card { break-inside: avoid; } }
"""

SCRIPT = """
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const draw = () => {
    const style = getComputedStyle(document.documentElement);
    const variable = name => style.getPropertyValue(name).trim();
    const resolve = value =>
      typeof value === "string" ? (value.startsWith("--") ? variable(value) : value)
      : Array.isArray(value) ? value.map(resolve)
      : value && typeof value === "object"
        ? Object.fromEntries(Object.entries(value).map(([key, inner]) => [key, resolve(inner)]))
      : value;
    for (const [id, figure] of Object.entries(figures)) {
      const { data, layout } = resolve(figure);
      layout.font = { family: variable("--text"), size: 13, color: variable("--quiet") };
      layout.paper_bgcolor = layout.plot_bgcolor = "rgba(0,0,0,0)";
      layout.xaxis.title.font = { size: 12.5, color: variable("--quiet") };
      layout.yaxis.tickfont = { color: variable("--ink") };
      layout.hoverlabel = {
        bgcolor: variable("--card"), bordercolor: variable("--rule"),
        font: { family: variable("--text"), size: 13, color: variable("--ink") },
      };
      Plotly.react(id, data, layout, { displayModeBar: false, responsive: true, showTips: false });
    }
  };
  dark.addEventListener("change", draw);
  draw();
})();
"""
