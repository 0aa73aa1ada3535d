"""The inputs of a run at its launch: read, and compared with those that the run was started with.

Called by `cli/launch.py` before a run starts or continues. Starts no process and writes no file.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from grpo_run.cli.launch_options.parse import LaunchCommand
from grpo_run.runtime.errors import UsageError
from grpo_run.runtime.history.history import History
from grpo_run.runtime.history.run_directory import RunDirectory
from grpo_run.runtime.launch.config import Exclusion
from grpo_run.runtime.launch.imported_files import digests, read_record
from grpo_run.runtime.launch.inputs import (
    Inputs,
    changed_environment,
    changes_of_training,
    changes_of_versions,
    collect,
    files_named,
)

SHOWN_CHANGES = 4
PARALLELISM = ("ACCELERATE_", "FSDP_")
"""Variables by which an accelerate configuration file changes training."""


def inputs_of(launch: LaunchCommand) -> Inputs:
    """Read what the result of the run depends on besides its command."""
    config = launch.config
    settings: dict[str, object] = {f"--generation {name}": value for name, value in config.generation.items()}
    exclusion, usual = config.exclusion, Exclusion()
    if exclusion.masked_ends != usual.masked_ends:
        settings["--mask-capped"] = ",".join(exclusion.masked_ends) or "none"
    if exclusion.repeat_rewards_above != usual.repeat_rewards_above:
        settings["--repeat-rewards-above"] = exclusion.repeat_rewards_above
    parallelism = {name: value for name, value in config.environment.items() if name.startswith(PARALLELISM)}
    return collect([launch.script, *files_named(config.arguments)], os.environ, {**settings, **parallelism})


def check_inputs(launch: LaunchCommand, directory: RunDirectory, history: History, inputs: Inputs) -> None:
    """Refuse to continue a run whose inputs have changed, unless the user accepts it.

    Raises:
        UsageError: something that may change the training has changed, or the checkpoint that a finished run has named is gone.
    """
    run_id = launch.config.run_id
    checkpoint = history.checkpoint
    # a script may delete its checkpoints before its last line; the sentence names what was on disk then
    if (
        history.finished
        and checkpoint is not None
        and checkpoint.path in history.sentence
        and not Path(checkpoint.path).exists()
    ):
        raise UsageError(
            f"run {run_id} has finished, but its last checkpoint {checkpoint.path} is gone; use --fresh to train again"
        )
    recorded = Inputs.from_json(directory.read_run().get("inputs")) if directory.run_json.is_file() else None
    if recorded is None:
        return
    imported = read_record(directory.imports)
    recorded = replace(recorded, files={**recorded.files, **imported})
    inputs = replace(inputs, files={**inputs.files, **digests(imported, Path.cwd())})
    changes = changes_of_training(recorded, inputs)
    nothing_to_lose = checkpoint is None and history.snapshot_step is None and not history.finished
    if changes and not launch.accept_change and not nothing_to_lose:
        done = "has finished" if history.finished else f"is at step {history.step} of {history.target_steps}"
        ways = (
            "use --fresh" if history.finished else "continue with --accept-change, or start over with --fresh"
        )
        raise UsageError(f"run {run_id} {done}, and since it began {_listed(changes)}; {ways}")
    said = [*changes, *changes_of_versions(recorded, inputs)]
    if said:
        print(f"grpo-run: changed since the run began: {_listed(said)}")
    others = changed_environment(recorded, inputs)
    if others:
        print(f"grpo-run: environment variables that differ from the last launch: {_listed(others)}")


class ChangedFiles:
    """What has changed in the files of a run between the attempts of one launch.

    The ranks of the next attempt read them again. A restart is not refused for it: nobody is there to be asked.

    Args:
        directory: of the run.
        inputs: as they were when it was launched.
    """

    def __init__(self, directory: RunDirectory, inputs: Inputs) -> None:
        self._directory = directory
        self._inputs = inputs

    def since_last_attempt(self) -> str | None:
        """Return what has changed since the last call, as one line; None if nothing has."""
        files = {**read_record(self._directory.imports), **self._inputs.files}
        before = replace(self._inputs, files=files)
        now = collect(files, os.environ, before.settings)
        changes = [*changes_of_training(before, now), *changes_of_versions(before, now)]
        self._inputs = now
        return f"changed since the last attempt: {_listed(changes)}" if changes else None


def _listed(changes: list[str]) -> str:
    more = f" and {len(changes) - SHOWN_CHANGES} more" if len(changes) > SHOWN_CHANGES else ""
    return f"{', '.join(changes[:SHOWN_CHANGES])}{more}"
