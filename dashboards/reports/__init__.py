"""Reports: a whole run, or one of its incidents, as a file that explains what happened.

`run_page.py` and `incident_page.py` build the pages for `grpo-run report` of what `run_contents.py` and
`incident_contents.py` read; `charts.py` draws, `rendering.py` fills templates, `templates/` holds the HTML.
What the live page shows as well is in `dashboards/run_facts.py`. `trace.py` is for `grpo-run trace`. May
import `runtime/`, `watchdog/` and jinja2. Does not judge; verdicts are on disk.
"""
