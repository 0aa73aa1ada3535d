"""DeepSpeed's configuration from a script or accelerate: which batch settings it fixes.

Called by `script_settings.py`. transformers fills in `auto` later, so sizes are read from where
they were given. Does not import DeepSpeed.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
USED = "ACCELERATE_USE_DEEPSPEED"
FILE = "ACCELERATE_DEEPSPEED_CONFIG_FILE"
ACCUMULATION = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
"""Variables of accelerate, which its own configuration file sets; without `FILE` the others make the
configuration.
"""
AUTO = "auto"


def explicit_sizes(arguments: Any) -> Iterator[str]:
    """Yield the settings of DeepSpeed that fix the sizes of a batch, beside those of the trainer's arguments.

    Args:
        arguments: the trainer's.
    """
    given = _given(arguments)
    for name in SIZES:
        if given.get(name, AUTO) != AUTO:
            yield f"{name} in DeepSpeed's configuration"
    if not given and _uses_accelerate() and os.environ.get(ACCUMULATION, AUTO) != AUTO:
        yield "gradient_accumulation_steps in accelerate's configuration of DeepSpeed"


def follow_sizes(arguments: Any) -> None:
    """Let DeepSpeed's configuration have the sizes of the trainer's arguments where transformers has filled
    them in for `auto`.

    Args:
        arguments: the trainer's, whose configuration fixes no size of its own.
    """
    plugin = getattr(arguments, "deepspeed_plugin", None)
    configuration = {} if plugin is None else plugin.hf_ds_config.config
    for name, value in (
        ("train_micro_batch_size_per_gpu", arguments.per_device_train_batch_size),
        ("gradient_accumulation_steps", arguments.gradient_accumulation_steps),
    ):
        if configuration.get(name, AUTO) != AUTO:
            configuration[name] = value


def _uses_accelerate() -> bool:
    return os.environ.get(USED, "").lower() in ("true", "1")


def _given(arguments: Any) -> Mapping[str, Any]:
    """Return the configuration as it was given: by the script, or by accelerate's file; empty if there is
    none.
    """
    given = getattr(arguments, "deepspeed", None)
    if not given and _uses_accelerate():
        given = os.environ.get(FILE)
    if isinstance(given, str):
        given = _read(given)
    return given if isinstance(given, Mapping) else {}


def _read(given: str) -> Any:
    """Return a configuration from a path, or from its text in base64; None if it is neither."""
    try:
        if os.path.exists(given):
            return json.loads(Path(given).read_bytes())
        return json.loads(base64.urlsafe_b64decode(given))
    except (OSError, ValueError, binascii.Error):
        return None
