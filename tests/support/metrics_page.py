"""Write docs/reference/metrics.md, which lists every metric and its panels; run by `make generated`."""

from __future__ import annotations

import re

from grpo_run.dashboards.metrics.catalogue import ALL_METRICS
from grpo_run.watchdog.rank_metrics import LOGGED
from support.provisioned import FOLDER, PAGES, dashboard, queries_of

PAGE = FOLDER / "docs" / "reference" / "metrics.md"

HEAD = """# Metrics

What the exporter of a run serves at `http://127.0.0.1:9460/metrics`, or at the address of `--metrics-addr`.
Each series also has the label `run_id`. This page is generated from the catalogue (`make generated`).

A value that cannot be observed is absent, never 0. Counters start at 0. What ranks publish is listed in
`watchdog/rank_metrics.py`, computed values are read in `dashboards/metrics/catalogue.py`. The last column
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
        f"| `{metric.name}` | {metric.kind} | {metric.unit} | {', '.join(metric.labels)} | {metric.help}"
        f" | {logged.get(metric.name, '')} | {', '.join(panels[metric.name])} |"
        for metric in ALL_METRICS
    ]
    return HEAD + "\n".join(rows) + "\n"


def _panels() -> dict[str, list[str]]:
    """Return the titles of the panels that query each metric; a histogram is queried by its parts."""
    queries = {
        title: " ".join(expressions)
        for name in PAGES
        for title, expressions in queries_of(dashboard(name)).items()
        if not title.startswith(("annotation ", "variable "))
    }
    return {
        metric.name: [
            title
            for title, text in queries.items()
            if re.search(rf"\b{metric.name}(_bucket|_sum|_count)?\b", text)
        ]
        for metric in ALL_METRICS
    }


if __name__ == "__main__":
    PAGE.write_text(metrics_page(), encoding="utf-8")
    print(PAGE)
