"""Which run a command continues: its id and directory, what has changed since, and `--resume-from`.

Checkpoints are found by the run's id, so a new run needs an id that no earlier run of the command has. The
inputs of a run are compared with those that it was started with. A name in `--resume-from` that cannot be a
run or a checkpoint is refused, and so is an older checkpoint of the run itself; the ranks check the
checkpoint: its digests, and whether it fits the model and the batch. Called by
`_configuration.py` and `launch.py`. Starts no process and writes no file.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from grpo_run.runtime.checkpoints.completeness import TRAINER_STATE
from grpo_run.runtime.checkpoints.manifest import MANIFEST, read_manifest
from grpo_run.runtime.checkpoints.search import (
    SNAPSHOTS,
    directories_of_run,
    find_checkpoints,
    output_directory_of,
)
from grpo_run.runtime.errors import CheckpointError, UsageError
from grpo_run.runtime.features import feature_settings
from grpo_run.runtime.history.history import History
from grpo_run.runtime.history.run_directory import DEFAULT_ROOT, RunDirectory, default_run_id
from grpo_run.runtime.launch.config import RunConfig
from grpo_run.runtime.launch.imported_files import digests, read_record
from grpo_run.runtime.launch.inputs import (
    Inputs,
    changes_of_training,
    changes_of_versions,
    collect,
    files_named,
)
from grpo_run.runtime.launch.option import changed_training
from grpo_run.runtime.launching.request import RunRequest
from grpo_run.runtime.snapshots.ownership import recorded_areas
from grpo_run.runtime.snapshots.slot import STAGED
from grpo_run.watchdog.text import did_you_mean

MAX_SHOWN_CHARACTERS = 200
"""Of the recorded command in a message."""


class RunLocation(NamedTuple):
    """A run's id and directory. `series` is the id without the number that `--fresh` appends."""

    series: str
    run_id: str
    directory: Path


def identifying_words(request: RunRequest) -> list[str]:
    """Return the words that identify the run: the script or `-m` with a module, and its arguments.

    Options are left out: a run that is continued with another time limit is the same run. A script's path is
    relative to the working directory, without symbolic links, so that `train.py` and `./train.py` are one
    script.
    """
    if request.module:
        return ["-m", request.target, *request.arguments]
    return [os.path.relpath(os.path.realpath(request.target)), *request.arguments]


def locate(request: RunRequest, command: Sequence[str], nodes: int, token: str) -> RunLocation:
    """Return where the run of a command is.

    The newest run of the same command is continued. With `--fresh`, the next number of its series is a new
    run. In a directory of the user's choice the numbers are not known: there a new run is named by
    `--run-id`, or with the token.

    Args:
        command: the words that identify the run.
        nodes: the largest number of nodes; with several, the node's name is part of the directory's name.
        token: random; part of the id of a new run in a directory of the user's choice.

    Raises:
        UsageError: the id is not a plain name, the directory belongs to another command, or `--fresh` cannot
            be obeyed.
    """
    options, fresh = request.launch, request.options.fresh
    # of the script's own name, also if it is started through a link
    base = options.run_id or default_run_id(command[1] if command[0] == "-m" else command[0], command)
    if "/" in base or base in ("", ".", ".."):
        raise UsageError(f"--run-id {base!r}: give a name without slashes")
    if options.run_dir:
        path = Path(options.run_dir)
        recorded = _recorded(RunDirectory(path=path), command, "--run-dir")
        if recorded is not None and fresh:
            raise UsageError(f"--fresh: there is a run in --run-dir {path}; give another directory")
        if fresh and not options.run_id:
            if nodes > 1:
                raise UsageError(
                    "--fresh --run-dir on several nodes: they cannot choose the new run's id by themselves;"
                    " give one that is new with --run-id, the same on every node"
                )
            return RunLocation(base, f"{base}-{token}", path)
        return RunLocation(base, options.run_id or recorded or base, path)
    suffix = "" if nodes == 1 else f"-{os.uname().nodename}"
    run_id, number = base, 1
    while run := RunDirectory(path=DEFAULT_ROOT / f"{base}-{number + 1}{suffix}").recorded():
        number += 1
        # otherwise a run that was named so with --run-id
        if run.get("command") == list(command) and run.get("series", base) == base:
            run_id = f"{base}-{number}"
    directory = RunDirectory(path=DEFAULT_ROOT / f"{run_id}{suffix}")
    if _recorded(directory, command, "--run-id") is not None and fresh:
        owner = directory.owner()
        if owner is not None:
            raise UsageError(f"--fresh: run {run_id} of this command is running (pid {owner}); stop it first")
        run_id = f"{base}-{number + 1}"
        directory = RunDirectory(path=DEFAULT_ROOT / f"{run_id}{suffix}")
    return RunLocation(base, run_id, directory.path)


def _recorded(directory: RunDirectory, command: Sequence[str], option: str) -> str | None:
    """Return the id of the run in a directory; None if there is none.

    Raises:
        UsageError: it is a run of another command.
    """
    run = directory.recorded()
    if not run:
        return None
    recorded = run.get("command")
    if recorded != list(command):
        words = shlex.join(recorded) if isinstance(recorded, list) else "an unknown command"
        raise UsageError(
            f"{directory.path} holds run {run.get('run_id')} of another command ({_shortened(words)}); give"
            f" another {option}"
        )
    return str(run["run_id"])


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_SHOWN_CHARACTERS else text[: MAX_SHOWN_CHARACTERS - 1] + "…"


SHOWN_CHANGES = 4
PARALLELISM = ("ACCELERATE_", "FSDP_")
"""Variables by which an accelerate configuration file changes training."""


def inputs_of(config: RunConfig, script: Path) -> Inputs:
    """Read what the result of a run depends on besides its command, with the file that will run."""
    settings = changed_training(*map(config.of, feature_settings()), config)
    parallelism = {name: value for name, value in config.environment.items() if name.startswith(PARALLELISM)}
    return collect([script, *files_named(config.arguments)], os.environ, {**settings, **parallelism})


def check_inputs(
    run_id: str, directory: RunDirectory, history: History, inputs: Inputs, *, accept_change: bool
) -> None:
    """Refuse to continue a run whose inputs have changed, unless the user accepts it.

    Raises:
        UsageError: something that may change the training has changed, or the checkpoint that a finished run
            has named is gone.
    """
    checkpoint = history.checkpoint
    # a script may delete its checkpoints before its last line; the sentence names what was on disk then
    if (
        history.finished
        and checkpoint is not None
        and checkpoint.path in history.sentence
        and not Path(checkpoint.path).exists()
    ):
        raise UsageError(
            f"run {run_id} has finished, but its last checkpoint {checkpoint.path} is gone; use --fresh to"
            " train again"
        )
    recorded = Inputs.from_json(directory.recorded().get("inputs"))
    if recorded is None:
        return
    imported = read_record(directory.imports)
    recorded = replace(recorded, files={**recorded.files, **imported})
    inputs = replace(inputs, files={**inputs.files, **digests(imported, Path.cwd())})
    changes = changes_of_training(recorded, inputs)
    nothing_to_lose = checkpoint is None and history.snapshot_step is None and not history.finished
    if changes and not accept_change and not nothing_to_lose:
        done = "has finished" if history.finished else f"is at step {history.step} of {history.target_steps}"
        ways = (
            "use --fresh" if history.finished else "continue with --accept-change, or start over with --fresh"
        )
        raise UsageError(f"run {run_id} {done}, and since it began {_listed(changes)}; {ways}")
    said = [*changes, *changes_of_versions(recorded, inputs)]
    if said:
        print(f"grpo-run: changed since the run began: {_listed(said)}")


class ChangedFiles:
    """What has changed in the files of a run between the attempts of one launch.

    The ranks of the next attempt read them again. A restart is not refused for it: nobody is there to be
    asked.

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


class _Saved(NamedTuple):
    """What a run has saved, ordered by its place in the run."""

    train_call: int
    step: int
    place: str


def check_resume_from(value: str | None, run_directory: Path, script_arguments: Sequence[str]) -> None:
    """Refuse a value that names neither a checkpoint nor a known run.

    A run is known by its directory under `runs/` or beside this run's directory, or by a checkpoint with its
    id in a directory that the script's arguments name, or up to two levels below the working directory.

    Raises:
        UsageError: the value is none of these; the message names the closest run.
    """
    if value is None:
        return
    path = Path(value)
    if path.is_dir():
        if not any((path / name).is_file() for name in (MANIFEST, TRAINER_STATE)):
            raise UsageError(f"--resume-from {value}: not a checkpoint directory (no {TRAINER_STATE} in it)")
        return
    roots = (DEFAULT_ROOT, run_directory.parent)
    if any((root / value / "run.json").is_file() for root in roots):
        return
    if any(
        found.manifest.run_id == value
        for folder in _output_directories(script_arguments)
        for found in find_checkpoints(*directories_of_run(value, folder))
    ):
        return
    known = [file.parent.name for root in roots for file in root.glob("*/run.json")]
    hint = did_you_mean(value, known, "give a run id or a checkpoint directory")
    raise UsageError(
        f"--resume-from {value}: no such run under {DEFAULT_ROOT}/ and no such directory; {hint}"
    )


def check_against_run(config: RunConfig, directory: RunDirectory, history: History) -> None:
    """Refuse to go back within a run, which would give up its newer checkpoints; print it if the value has no
    effect.

    A command that was launched before may be repeated: it continues the run.

    Args:
        directory: of the run, with the `run.json` of its last launch.

    Raises:
        UsageError: the value is an older checkpoint of this run, and the last launch did not name it.
    """
    value = config.resume_from
    if value is None or value == config.run_id:
        return
    named = _script_checkpoint(Path(value), config.run_id)
    newest = _newest_saved(config.run_id, directory, history, Path(value) if named is not None else None)
    if newest is None or (named is not None and newest[:2] <= named[:2]):
        return
    repeated = directory.recorded().get("resume_from") == value
    if named is not None and not repeated:
        raise UsageError(
            f"--resume-from {value}: run {config.run_id}, to which it belongs, has a newer {newest.place};"
            " to start another run from it, add --fresh (and another --run-dir, if one is given); to"
            " continue from the newest, leave --resume-from out"
        )
    if history.finished:
        return  # nothing continues
    print(
        f"grpo-run: --resume-from {value} has no effect: run {config.run_id} continues from its own newest"
        " checkpoint or snapshot; with --fresh, another run starts from it"
    )


def _script_checkpoint(path: Path, run_id: str) -> _Saved | None:
    """Return the checkpoint in a directory if it is of this run."""
    if not (path / MANIFEST).is_file():
        return None
    try:
        manifest = read_manifest(path)
    except CheckpointError:
        return None  # the ranks say what is wrong with it
    if manifest.run_id != run_id:
        return None
    return _Saved(manifest.train_call.ordinal, manifest.step, str(path))


def _newest_saved(
    run_id: str, directory: RunDirectory, history: History, named: Path | None
) -> _Saved | None:
    """Return the newest checkpoint or snapshot of a run in the directories that are known."""
    folders = [Path(path) for path in history.calls.output_directories]
    if named is not None:
        folders.append(output_directory_of(named.resolve()))
    saved = [
        _Saved(found.manifest.train_call.ordinal, found.manifest.step, f"checkpoint, {found.path}")
        for found in find_checkpoints(*directories_of_run(run_id, *folders))
        if found.manifest.run_id == run_id
    ]
    if history.snapshot_step is not None:
        areas = recorded_areas(directory.recorded())
        if any(any(area.glob(f"*/{STAGED}")) for area in areas):
            place = f"snapshot in memory, of step {history.snapshot_step}"
            saved.append(_Saved(history.train_call, history.snapshot_step, place))
    return max(saved, default=None)


def _output_directories(script_arguments: Sequence[str]) -> Iterator[Path]:
    for word in script_arguments:
        folder = Path(word.rpartition("=")[2])
        if "\0" not in word and folder.is_dir():
            yield folder
    for above in ("", "*/", "*/*/"):
        for name in ("checkpoint-*", f"*{SNAPSHOTS}/*/*/snapshot-*"):
            manifests = Path().glob(f"{above}{name}/{MANIFEST}")
            yield from sorted({output_directory_of(manifest.parent) for manifest in manifests})
