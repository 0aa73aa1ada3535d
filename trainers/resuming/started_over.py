"""Output directories of a run that has started over, because the run before it could not be resumed.

Its calls write beside the directories that the script names, so nothing of the earlier run is overwritten or deleted, and
do not resume from checkpoints there. Called at the start of each call. Moves no files.
"""

from __future__ import annotations

from pathlib import Path

from grpo_run.runtime.launch.config import RunConfig


def output_directory(config: RunConfig, chosen: str) -> str:
    """Return where a call writes: in the directory that the script names, or beside it if the run has started over."""
    suffix = _suffix(config)
    return chosen if chosen.endswith(suffix) else f"{chosen.rstrip('/')}{suffix}"


def script_argument(config: RunConfig, chosen: str, argument: str | bool | None) -> str | bool | None:
    """Return the script's `resume_from_checkpoint`; None if it means a checkpoint in the directory that is left alone."""
    if not config.starts_over or not argument:
        return argument
    left = Path(chosen.removesuffix(_suffix(config))).resolve()
    return None if argument is True or left in Path(argument).resolve().parents else argument


def _suffix(config: RunConfig) -> str:
    return f".{config.run_id}" if config.starts_over else ""
