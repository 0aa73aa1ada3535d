"""Writes the generated files: the Grafana dashboard and the Prometheus alert rules.

Run as `python -m grpo_run.dashboards.provisioning.generate` after a change to the catalogue, the dashboard or the rules;
a test fails while the committed files are stale.
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
"""Path under the `dashboards` folder, and what makes its text."""


def write_generated(root: Path) -> list[Path]:
    """Write every generated file under `root`, making folders as needed; returns their paths.

    Raises:
        ValueError: a query asks for what the catalogue does not have; nothing is written then.
    """
    texts = {root / name: make() for name, make in GENERATED.items()}
    for path, text in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return list(texts)


if __name__ == "__main__":
    for written in write_generated(FOLDER):
        print(written)
