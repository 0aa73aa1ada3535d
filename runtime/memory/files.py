"""Facts of a call about its memory, in the run directory: written by ranks, read by the supervisor.

Predicts and decides nothing.
"""

from __future__ import annotations

from pathlib import Path

from grpo_run.runtime.files import write_json
from grpo_run.runtime.memory.facts import MemoryFacts

FILE_NAME = "memory_facts.json"
"""Name of the file in the run directory."""


def write_facts(run_directory: Path, facts: MemoryFacts) -> None:
    """Write the facts, atomically and with mode 0600.

    Raises:
        OSError: the file cannot be written.
    """
    write_json(run_directory / FILE_NAME, facts.model_dump(mode="json"), durable=False)


def read_facts(run_directory: Path) -> MemoryFacts | None:
    """Return the facts of the last `train()` call that began; None if there are none, or they cannot be
    read.
    """
    try:
        return MemoryFacts.model_validate_json((run_directory / FILE_NAME).read_bytes())
    except (OSError, ValueError):  # pydantic's error is a ValueError
        return None
