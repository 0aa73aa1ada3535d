"""The incident report: one HTML page per incident that explains what happened and shows the evidence.

May import `runtime`, `watchdog` and jinja2. Start reading at `page.py`, which builds the page for `grpo-run
report`. `contents.py` and `collective_logs.py` read the incident's files, `facts.py`, `tables.py` and
`timeline_chart.py` turn them into facts, tables and charts, `formatting.py` formats values, and `templates/`
holds the HTML, the style sheet and the script of the charts.
"""
