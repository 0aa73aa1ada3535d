"""The file of the facts of a call: `memory_facts.json` in the run directory.

Written by ranks, read by the supervisor. Does not say what follows from the facts.
"""

from __future__ import annotations

import json
from pathlib import Path

from grpo_run.runtime.continuity.memory_facts import MemoryFacts
from grpo_run.runtime.files import write_json

FILE_NAME = "memory_facts.json"
"""Name of the file in the run directory."""
MAX_BYTES = 1 << 20
"""Far above the size of any such file. A larger one is not read."""


def write_facts(run_directory: Path, facts: MemoryFacts) -> None:
    """Write the facts, atomically and with mode 0600.

    Raises:
        OSError: the file cannot be written.
    """
    write_json(run_directory / FILE_NAME, facts.model_dump(mode="json"), durable=False)


def read_facts(run_directory: Path) -> MemoryFacts | None:
    """Return the facts of the last `train()` call that began; None if there are none, or they cannot be read."""
    path = run_directory / FILE_NAME
    try:
        if path.stat().st_size > MAX_BYTES:
            return None
        return MemoryFacts.model_validate(json.loads(path.read_bytes()))
    except (OSError, ValueError, RecursionError):  # pydantic's error is a ValueError
        return None
