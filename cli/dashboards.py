"""`grpo-run dashboards export DIR`: write Grafana dashboards, alert rules and the configuration around them.

Dashboards and rules are those of `dashboards/provisioning.py`, the rest is copied from `dashboards/stack`.
Starts nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

import yaml

from grpo_run.cli.command_parser import CommandParser
from grpo_run.dashboards.provisioning import RUNBOOK, alert_rules, dashboards
from grpo_run.runtime.errors import UsageError
from grpo_run.runtime.registry import targets_folder

FILES = {
    "compose.yaml": "stack/compose.yaml",
    "prometheus/prometheus.yml": "stack/prometheus.yml",
    "alertmanager/alertmanager.yml": "stack/alertmanager.yml",
    "grafana/provisioning/datasources/prometheus.yml": "stack/datasource.yml",
    "grafana/provisioning/dashboards/grpo-run.yml": "stack/provider.yml",
}
"""Path below the given folder, and of the file in the package `dashboards`."""


def main(arguments: Sequence[str]) -> int:
    """Write the files, print what to do with them; returns 0."""
    parser = CommandParser(
        prog="grpo-run dashboards",
        description="Write Grafana dashboards, Prometheus alert rules, and what connects them.",
    )
    parser.add_argument("action", choices=["export"], help="write the files")
    parser.add_argument("directory", metavar="DIR", type=Path, help="where to; created if it does not exist")
    parser.add_argument(
        "--runbook-base",
        metavar="URL",
        default=RUNBOOK,
        help="page that alerts link to, as served by a run or by `grpo-run serve` (default: %(default)s)",
    )
    parser.add_argument("--force", action="store_true", help="replace files that differ")
    options = parser.parse_args(arguments)
    if not options.runbook_base.startswith(("http://", "https://")):
        raise UsageError(
            f"--runbook-base {options.runbook_base!r} is not an address: use http:// or https://"
        )
    texts = _texts(options.runbook_base)
    different = [
        name
        for name, text in texts.items()
        if (options.directory / name).exists() and (options.directory / name).read_text() != text
    ]
    if different and not options.force:
        raise UsageError(
            f"{options.directory / different[0]} exists with other content; use --force to replace it, or"
            " choose another directory"
        )
    try:
        for name, text in texts.items():
            path = options.directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    except OSError as error:
        raise UsageError(f"cannot write {error.filename}: {error.strerror}") from None
    print(f"wrote {len(texts)} files to {options.directory}")
    print(f"with Docker: cd {options.directory} && docker compose up -d, then open http://127.0.0.1:3000")
    return 0


def _texts(runbook: str) -> dict[str, str]:
    package = files("grpo_run.dashboards")
    texts = {name: package.joinpath(source).read_text() for name, source in FILES.items()}
    texts["prometheus/alerts.yml"] = yaml.safe_dump(alert_rules(runbook), sort_keys=False, width=110)
    for name, model in dashboards().items():
        texts[f"grafana/dashboards/{name}.json"] = json.dumps(model, indent=2) + "\n"
    texts["compose.yaml"] = texts["compose.yaml"].replace("TARGETS", str(targets_folder() or "./targets"))
    return texts
