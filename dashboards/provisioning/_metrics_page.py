"""The page that lists every metric, `docs/reference/metrics.md`, from the catalogue. Written by
`generate.py`.
"""

from __future__ import annotations

import re

from grpo_run.dashboards.metrics.catalogue import ALL_METRICS
from grpo_run.dashboards.provisioning._grafana import PAGES
from grpo_run.watchdog.rank_metrics import LOGGED

HEAD = """# Metrics

What the exporter of a run serves at `http://127.0.0.1:9460/metrics`, or at the address of `--metrics-addr`.
Each series also has the label `run_id`. This page is generated from the catalogue (`make generated`).

A value that cannot be observed is absent, never 0. Counters start at 0. What ranks publish is listed in
`watchdog/rank_metrics.py`, computed values are read in `dashboards/metrics/_readings.py`. The last column
but one names what is read of a Trainer's log or of `loop.log`, the last one the panels of the
[dashboards](../guide/dashboards.md).

| metric | kind | unit | labels | meaning | logged as | panels |
|---|---|---|---|---|---|---|
"""


def metrics_page() -> str:
    """Return the page's text."""
    logged = {metric.name: ", ".join(f"`{name}`" for name in metric.logged_as) for metric in LOGGED}
    panels = _panels()
    rows = [
        f"| `{metric.name}` | {metric.kind} | {metric.unit} | {', '.join(metric.label_names)} | {metric.help}"
        f" | {logged.get(metric.name, '')} | {', '.join(panels[metric.name])} |"
        for metric in ALL_METRICS
    ]
    return HEAD + "\n".join(rows) + "\n"


def _panels() -> dict[str, list[str]]:
    """Return the titles of the panels that query each metric; a histogram is queried by its parts."""
    queries = {
        panel.body["title"]: " ".join(target["expr"] for target in panel.body.get("targets", ()))
        for page in PAGES.values()
        for panel in page.panels()
    }
    return {
        metric.name: [
            title
            for title, text in queries.items()
            if re.search(rf"\b{metric.name}(_bucket|_sum|_count)?\b", text)
        ]
        for metric in ALL_METRICS
    }
