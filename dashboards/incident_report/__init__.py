"""The incident report: one HTML page per incident that explains what happened and shows the evidence.

Start with `page.py`, which builds the page for `grpo-run report`. `contents.py` and `evidence_files.py`
read the incident's files, `facts.py` and `timeline_chart.py` turn them into facts and charts, and
`templates/` holds the HTML, the style sheet and the script of the charts. May import `runtime/`,
`watchdog/` and jinja2. Does not judge; the verdict is on disk.
"""
