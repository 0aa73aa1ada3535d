"""A digest of a trainer's settings: equal in every attempt, although its output directory has another name.

Tells apart calls of one class, for example a loop over seeds or models. Called by `hooks/resume.py` on rank 0.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Sized
from typing import Any

from grpo_run.trainers.memory_plan.record import original_settings

NAMES = frozenset({"output_dir", "logging_dir", "run_name", "hub_model_id", "project", "trackio_space_id"})
"""Settings that name the run or its place, often with the time."""
ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def settings_digest(trainer: Any) -> str:
    """Return a digest of the trainer's arguments and of its data's size; empty if there are none.

    The model is not part of it: its path may be in another stage's directory. Checkpoints tell its shape.
    """
    arguments: Any = getattr(trainer, "args", None)
    if not hasattr(arguments, "to_dict"):
        return ""
    # with a memory plan it is the same call
    settings = {**arguments.to_dict(), **original_settings(arguments)}
    values = {name: value for name, value in settings.items() if name not in NAMES}
    dataset = getattr(trainer, "train_dataset", None)
    values["examples"] = len(dataset) if isinstance(dataset, Sized) else None
    values["columns"] = list(getattr(dataset, "column_names", None) or ())
    text = ADDRESS.sub("", json.dumps(values, sort_keys=True, default=repr))
    output_dir = str(arguments.output_dir)
    for name in (output_dir, os.path.basename(os.path.normpath(output_dir))):
        text = text.replace(json.dumps(name)[1:-1], "<output_dir>") if len(name) > 2 else text
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:16]
