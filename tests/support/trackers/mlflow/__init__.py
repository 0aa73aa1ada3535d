"""A stand-in for MLflow whose server is the file `mlflow.jsonl` in the working directory.

As there, a run is continued by an id that the server knows, from an argument or `MLFLOW_RUN_ID`, and there is
one active run unless runs are nested.
"""

import json
import os
import uuid
from pathlib import Path
from types import SimpleNamespace

from mlflow.utils import validation as validation

__version__ = "3.18.0"
SERVER = Path("mlflow.jsonl")
_active = []


def received():
    """Return what the server has received."""
    return [json.loads(line) for line in SERVER.read_text().splitlines()] if SERVER.exists() else []


def _send(event, **fields):
    with SERVER.open("a") as file:
        file.write(json.dumps({"run": active_run().info.run_id, "event": event, **fields}) + "\n")


def is_tracking_uri_set():
    """Whether a server was chosen."""
    return True


def get_tracking_uri():
    """Return the server."""
    return str(SERVER)


def start_run(run_id=None, experiment_id=None, run_name=None, nested=False):
    """Open a run."""
    if _active and not nested:
        raise RuntimeError("a run is active")
    run_id = run_id or os.environ.pop("MLFLOW_RUN_ID", None)
    if run_id and run_id not in {record["run"] for record in received()}:
        raise RuntimeError(f"run {run_id} does not exist")
    _active.append(SimpleNamespace(info=SimpleNamespace(run_id=run_id or uuid.uuid4().hex)))
    _send("continued" if run_id else "created", nested=nested)
    return _active[-1]


def active_run():
    """Return the run that is open."""
    return _active[-1] if _active else None


def end_run():
    """End the active run."""
    _send("ended")
    _active.pop()


def log_params(params, synchronous=True):
    """Send parameters."""


def log_metrics(metrics, step, synchronous=True):
    """Send values."""
    _send("log", step=step, values=metrics)
