"""A stand-in for wandb whose server is the file `wandb.jsonl` in the working directory.

As there, a run that is opened without an id gets a new one, and the steps of a run that is continued go on
from the last one of the server.
"""

import json
import os
import uuid
from pathlib import Path

SERVER = Path("wandb.jsonl")
run = None


class Config(dict):
    """The configuration of a run."""

    def update(self, values, allow_val_change=False):
        """Take values."""
        super().update(values)


class Run:
    """An open run."""

    def __init__(self, id, name):
        self.id, self.name, self.url, self.summary = id, name or id, None, {}

    def _label(self, code):
        """Say which library opened it."""

    def finish(self):
        """End it."""
        global run
        run = None


config = Config()


def received():
    """Return what the server has received."""
    return [json.loads(line) for line in SERVER.read_text().splitlines()] if SERVER.exists() else []


def _send(**record):
    with SERVER.open("a") as file:
        file.write(json.dumps(record) + "\n")


def init(entity=None, project=None, id=None, name=None, job_type=None, resume=None):
    """Open a run."""
    global run
    known = {record["run"] for record in received()}
    id, resume = id or os.environ.get("WANDB_RUN_ID"), resume or os.environ.get("WANDB_RESUME")
    if id in known and resume != "allow":
        raise RuntimeError(f"run {id} is not to be continued")
    run = Run(id or uuid.uuid4().hex[:8], name)
    _send(run=run.id, event="continued" if id in known else "created", job_type=job_type)
    return run


def log(values):
    """Send values."""
    steps = [record["step"] for record in received() if record["run"] == run.id and record["event"] == "log"]
    _send(run=run.id, event="log", step=max(steps, default=-1) + 1, values=values)


def define_metric(name, step_metric=None, step_sync=None):
    """Choose the axis of a metric."""
