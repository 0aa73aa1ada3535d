"""Write the generated files: the Grafana dashboard and the Prometheus alert rules.

Run `make generated` after a change to the metric catalogue, the dashboard or the rules. A test fails while
the committed files are out of date.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from grpo_run.dashboards.provisioning.alerts import alert_rules
from grpo_run.dashboards.provisioning.grafana import dashboard_text

FOLDER = Path(__file__).parents[1]

GENERATED: dict[str, Callable[[], str]] = {
    "grafana/grpo-run.json": dashboard_text,
    "prometheus/alerts.yml": alert_rules,
}
"""Path below `dashboards/`, and the function that returns the file's text."""


def write_generated(root: Path) -> list[Path]:
    """Write every generated file below `root`, and return the paths.

    Raises:
        ValueError: a query uses a metric or a label that is not exported. No file is written.
    """
    texts = {root / name: generate() for name, generate in GENERATED.items()}
    for path, text in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return list(texts)


if __name__ == "__main__":
    for written in write_generated(FOLDER):
        print(written)
