"""Trackers see one run, whatever happens to its ranks; the trackers' own settings win.

trackio and TensorBoard are the real ones. wandb and MLflow, which need servers, are stand-ins
(`tests/support/trackers`) that refuse what the real ones refuse.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from support.runs import SCRIPTS, Run

SCRIPT = str(SCRIPTS / "tracked.py")
STAND_INS = str(Path(__file__).parents[1] / "support" / "trackers")
SETTINGS = {"report_to": ["wandb", "trackio", "mlflow", "tensorboard"], "project": "sums"}
STEPS = 9


def received(tracker: str, folder: Path) -> list[dict[str, Any]]:
    """Return what the server of a stand-in has received."""
    return [json.loads(line) for line in (folder / f"{tracker}.jsonl").read_text().splitlines()]


def runs_of(records: Iterable[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return the records by run, in the order in which the runs were opened."""
    found: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        found.setdefault(record["run"], []).append(record)
    return found


def trackio_runs(folder: Path) -> dict[str, list[tuple[int, dict[str, Any]]]]:
    """Return the steps and values of each run in trackio's database."""
    found: dict[str, list[tuple[int, dict[str, Any]]]] = {}
    with sqlite3.connect(folder / "trackio" / "sums.db") as database:
        for name, step, values in database.execute("SELECT run_name, step, metrics FROM metrics ORDER BY id"):
            found.setdefault(name, []).append((step, json.loads(values)))
    return found


def losses(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return steps and losses of each folder of TensorBoard, as it shows them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = {}
    for directory in sorted({path.parent for path in folder.rglob("events.out.tfevents.*")}):
        events = EventAccumulator(str(directory)).Reload()
        found[directory.name] = [(point.step, point.value) for point in events.Scalars("train/loss")]
    return found


def global_steps(values: Iterable[dict[str, Any]]) -> list[int]:
    """Return the steps of training whose loss was logged."""
    return [one["train/global_step"] for one in values if "train/loss" in one]


def opened(records: Iterable[dict[str, Any]]) -> list[str]:
    """Return how each attempt opened a run."""
    return [record["event"] for record in records if record["event"] in ("created", "continued")]


@pytest.mark.parametrize(
    "killed", [pytest.param((4, 6), id="two"), pytest.param((4, 6, 8), id="three", marks=pytest.mark.full)]
)
def test_four_trackers_have_one_run_over_several_kills(
    killed: tuple[int, ...], runs: Callable[..., Run], tmp_path: Path
) -> None:
    """The values of repeated steps replace the first ones in TensorBoard, and follow them elsewhere."""
    faults = [word for step in killed for word in ("--inject", f"kill@rank{step % 4 == 0:d}:step{step}")]
    run = runs(
        "--nproc-per-node", "2", "--snapshot-every", "2", *faults, SCRIPT, "--output-dir", "ours",
        "--max-steps", str(STEPS), "--save-steps", str(STEPS), "--logging-steps", "1",
        "--step-seconds", "0.3", "--settings", json.dumps(SETTINGS),
        environment={
            "TRACKIO_DIR": str(tmp_path / "trackio"),
            "PYTHONPATH": os.pathsep.join(filter(None, [STAND_INS, os.environ.get("PYTHONPATH")])),
        },
    ).start()  # fmt: skip
    assert run.wait(200) == 0, run.tail()
    assert len(run.status()["recoveries"]) == len(killed), run.tail()
    attempts = [event["step"] + 1 for event in run.events("train_started") if event["rank"] == 0]
    assert attempts == [1, *(step - 1 for step in killed)]

    (wandb,) = runs_of(received("wandb", tmp_path)).values()
    assert opened(wandb) == ["created", *["continued"] * len(killed)]
    logs = [record for record in wandb if record["event"] == "log"]
    assert [record["step"] for record in logs] == list(range(len(logs))), "wandb's own steps never go back"
    logged = global_steps(record["values"] for record in logs)
    assert logged == sorted([*range(1, STEPS + 1), *(step - 1 for step in killed)])

    (mlflow,) = runs_of(received("mlflow", tmp_path)).values()
    assert opened(mlflow) == ["created", *["continued"] * len(killed)]
    assert [record["step"] for record in mlflow if "loss" in record.get("values", ())] == logged

    (trackio,) = trackio_runs(tmp_path).values()
    steps = [step for step, _ in trackio]
    assert steps == sorted(set(steps)), "trackio's own steps never go back"
    assert set(global_steps(values for _, values in trackio)) == set(range(1, STEPS + 1))

    (tensorboard,) = losses(tmp_path / "ours").values()
    assert [step for step, _ in tensorboard] == list(range(1, STEPS + 1))
