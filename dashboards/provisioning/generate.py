"""Write the generated files: the Grafana dashboards, the Prometheus alert rules and their pages.

Run `make generated` after a change to the metric catalogue, the dashboard or the rules. A test fails while
the committed files are out of date.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

from grpo_run.dashboards.provisioning._alerts import alert_rules, alerts_page
from grpo_run.dashboards.provisioning._grafana import PAGES, dashboard_text
from grpo_run.dashboards.provisioning._metrics_page import metrics_page

FOLDER = Path(__file__).parents[2]

GENERATED: dict[str, Callable[[], str]] = {
    **{f"dashboards/grafana/grpo-run-{name}.json": functools.partial(dashboard_text, name) for name in PAGES},
    "dashboards/prometheus/alerts.yml": alert_rules,
    "docs/reference/alerts.md": alerts_page,
    "docs/reference/metrics.md": metrics_page,
}
"""Path in the repository, and the function that returns the file's text."""


def write_generated(root: Path) -> list[Path]:
    """Write every generated file below `root`, and return the paths."""
    texts = {root / name: generate() for name, generate in GENERATED.items()}
    for path, text in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return list(texts)


if __name__ == "__main__":
    for written in write_generated(FOLDER):
        print(written)
