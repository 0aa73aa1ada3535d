"""The incident report: one HTML page per incident that explains what happened and shows the evidence.

Start with `page.py`, which builds the page for `grpo-run report`. `contents.py` reads the incident's files,
`facts.py` and `timeline_chart.py` turn them into facts and a chart, and `templates/` holds the HTML, the
style sheet and the script of the chart. May import `runtime/`, `watchdog/` and jinja2. Does not judge; the
verdict is on disk.
"""
