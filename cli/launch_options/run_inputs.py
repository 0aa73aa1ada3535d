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
from grpo_run.runtime.launch.inputs import Inputs, changes_of_training, changes_of_versions, collect
from grpo_run.runtime.launch.sources import local_modules

SHOWN_CHANGES = 4
PARALLELISM = ("ACCELERATE_", "FSDP_")
"""Variables by which an accelerate configuration file changes training."""


def inputs_of(launch: LaunchCommand) -> Inputs:
    """Read what the result of the run depends on besides its command."""
    config = launch.config
    settings: dict[str, object] = {f"--generation {name}": value for name, value in config.generation.items()}
    exclusion, usual = config.exclusion, Exclusion()
    if (
        exclusion.masked_ends != usual.masked_ends
    ):  # a run that an earlier version has begun has no such setting
        settings["--mask-capped"] = ",".join(exclusion.masked_ends) or "none"
    if exclusion.repeat_rewards_above != usual.repeat_rewards_above:
        settings["--repeat-rewards-above"] = exclusion.repeat_rewards_above
    parallelism = {name: value for name, value in config.environment.items() if name.startswith(PARALLELISM)}
    return collect(launch.sources, config.arguments, os.environ, {**settings, **parallelism})


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


class ChangedFiles:
    """What has changed in the script, its modules and its configuration files between the attempts of one launch.

    The ranks of the next attempt read them again. A restart is not refused for it: nobody is there to be asked.

    Args:
        launch: the command.
        inputs: as they were when it was launched.
    """

    def __init__(self, launch: LaunchCommand, inputs: Inputs) -> None:
        self._launch = launch
        self._inputs = inputs

    def since_last_attempt(self) -> str | None:
        """Return what has changed since the last call, as one line; None if nothing has."""
        first_entry = Path.cwd() if self._launch.config.module else None
        try:
            sources = tuple(local_modules(self._launch.sources[0].path, first_entry))
        except UsageError as error:
            return str(error)
        now = inputs_of(replace(self._launch, sources=sources))
        changes = [*changes_of_training(self._inputs, now), *changes_of_versions(self._inputs, now)]
        self._inputs = now
        return f"changed since the last attempt: {_listed(changes)}" if changes else None


def _listed(changes: list[str]) -> str:
    more = f" and {len(changes) - SHOWN_CHANGES} more" if len(changes) > SHOWN_CHANGES else ""
    return f"{', '.join(changes[:SHOWN_CHANGES])}{more}"
