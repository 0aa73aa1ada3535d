"""`grpo-run checkpoints list|verify|prune [DIR|RUN]`: list, verify and delete checkpoints."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from grpo_run.cli.command_parser import CommandParser
from grpo_run.cli.text import print_table
from grpo_run.runtime.catalog import find_run
from grpo_run.runtime.checkpoints.listing import (
    RENAMED_STATES,
    CheckpointEntry,
    CheckpointState,
    list_checkpoints,
    select_prunable,
)
from grpo_run.runtime.checkpoints.manifest import remove_manifest
from grpo_run.runtime.checkpoints.publishing import clean_partial_directories, is_abandoned
from grpo_run.runtime.checkpoints.search import output_directory_of, step_of
from grpo_run.runtime.errors import ConfigError, UsageError
from grpo_run.runtime.launching.reading import run_reader
from grpo_run.watchdog.text import size_text

EXIT_BAD = 1
"""`verify` found a damaged or incomplete checkpoint, or `prune` could not delete everything."""
TITLES = ["name", "step", "when", "size", "ranks", "scheduled", "run", "state"]


def main(arguments: Sequence[str]) -> int:
    """List, verify or prune checkpoints; returns 0, or 1 (`EXIT_BAD`)."""
    parser = CommandParser(prog="grpo-run checkpoints", description="List, verify and delete checkpoints.")
    actions = parser.add_subparsers(dest="action", required=True, metavar="list|verify|prune")
    for name, text in (
        ("list", "list checkpoints, newest first; compares names and sizes only"),
        ("verify", "compare every byte with the digests; exit code 1 if a checkpoint is bad"),
        ("prune", "show which checkpoints can be deleted; with --yes, delete them"),
    ):
        action = actions.add_parser(name, help=text, description=text)
        action.add_argument(
            "target",
            nargs="?",
            metavar="DIR|RUN",
            help=(
                "an output directory, a checkpoint-N directory, a run directory or a run id (default: the"
                " active run under runs/, or the last one that has trained)"
            ),
        )
        action.add_argument("--json", action="store_true", help="print one JSON object")
        if name == "prune":
            action.add_argument(
                "--keep",
                type=int,
                default=2,
                metavar="N",
                help="number of newest verified checkpoints to keep (default: %(default)s)",
            )
            action.add_argument(
                "--rejected",
                action="store_true",
                help="also delete rejected and abandoned partial checkpoints",
            )
            action.add_argument("--yes", action="store_true", help="delete instead of showing")
    options = parser.parse_args(arguments)
    directories = find_directories(options.target)
    if options.action == "prune":
        return _prune(directories, options)
    entries = [
        entry
        for directory in directories
        for entry in list_checkpoints(directory, verify=options.action == "verify")
    ]
    if not entries:
        raise UsageError(f"no checkpoint in {', '.join(map(str, directories))}")
    if options.action == "list":
        _show(entries, as_json=options.json)
        return 0
    return _verify(entries, as_json=options.json)


def find_directories(target: str | None) -> list[Path]:
    """Return the output directories that the argument names.

    Raises:
        UsageError: nothing has that name, or the run has not published a checkpoint.
    """
    if target is not None:
        path = Path(target)
        if path.is_dir() and not (path / "run.json").is_file():
            return [path]
    run = find_run(target)
    history = run_reader(run).history()
    if history.checkpoint is None:
        raise UsageError(f"run {run.path.name} has published no checkpoint yet")
    return [Path(path) for path in history.calls.output_directories]


def _show(entries: Sequence[CheckpointEntry], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"checkpoints": [entry.as_json() for entry in entries]}, indent=2))
        return
    for directory in dict.fromkeys(output_directory_of(entry.path) for entry in entries):
        print(directory)
        here = [entry for entry in entries if output_directory_of(entry.path) == directory]
        print_table([TITLES, *(_row(entry, directory) for entry in here)])


def _row(entry: CheckpointEntry, directory: Path) -> list[str]:
    manifest = entry.manifest
    return [
        os.path.relpath(entry.path, directory),
        str(entry.step),
        time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.modified_at)),
        size_text(entry.size_bytes),
        "" if entry.ranks is None else str(entry.ranks),
        "" if manifest is None else "kept" if manifest.kept else "yes" if manifest.scheduled else "no",
        "" if manifest is None else manifest.run_id,
        str(entry.state) + (f": {entry.problem}" if entry.problem else ""),
    ]


def _verify(entries: Sequence[CheckpointEntry], *, as_json: bool) -> int:
    checked = [entry for entry in entries if entry.state not in RENAMED_STATES]
    bad = [entry for entry in checked if entry.state in (CheckpointState.damaged, CheckpointState.incomplete)]
    if as_json:
        print(json.dumps({"bad": len(bad), "checkpoints": [entry.as_json() for entry in checked]}, indent=2))
    else:
        for entry in checked:
            if entry in bad:
                print(f"{entry.path}: {entry.state}: {entry.problem}")
            elif entry.manifest is not None:
                print(
                    f"{entry.path}: verified, {len(entry.manifest.files)} files,"
                    f" {size_text(entry.size_bytes)}"
                )
            else:
                print(f"{entry.path}: all required files exist; there is no manifest to verify them with")
        print(f"{len(checked) - len(bad)} of {len(checked)} good")
    return EXIT_BAD if bad else 0


def _prune(directories: Sequence[Path], options: argparse.Namespace) -> int:
    if options.keep < 1:
        raise ConfigError(
            f"--keep {options.keep}: must be 1 or more; the newest verified checkpoint is never deleted"
        )
    for directory in directories:
        if step_of(directory) is not None:
            raise UsageError(f"{directory} is a single checkpoint; give its directory, {directory.parent}")
    entries = [entry for directory in directories for entry in list_checkpoints(directory, verify=True)]
    selected = [
        entry
        for entry in select_prunable(
            entries, keep=options.keep, best=_best(entries), include_unusable=options.rejected
        )
        if entry.state is not CheckpointState.partial or is_abandoned(entry.path)
    ]
    remaining = [entry for entry in selected if options.yes and not _delete(entry)]
    deleted = [entry for entry in selected if options.yes and entry not in remaining]
    if options.json:
        value = {
            "would_delete": [] if options.yes else [str(entry.path) for entry in selected],
            "deleted": [str(entry.path) for entry in deleted],
            "not_deleted": [str(entry.path) for entry in remaining],
            "bytes": sum(entry.size_bytes for entry in (deleted if options.yes else selected)),
        }
        print(json.dumps(value, indent=2))
        return EXIT_BAD if remaining else 0
    for entry in selected:
        done = "would delete" if not options.yes else "could not delete" if entry in remaining else "deleted"
        print(f"{done} {entry.path} ({entry.state}, {size_text(entry.size_bytes)})")
    total = size_text(sum(entry.size_bytes for entry in (deleted if options.yes else selected)))
    if not selected:
        print("nothing to delete")
    else:
        print(f"{total} freed" if options.yes else f"{total} would be freed; add --yes to delete")
    return EXIT_BAD if remaining else 0


def _delete(entry: CheckpointEntry) -> bool:
    """Delete a checkpoint; return whether it is gone."""
    try:
        if entry.state is CheckpointState.partial:
            clean_partial_directories(entry.path.parent)  # judged again under its lock
        else:
            remove_manifest(entry.path)  # first, so that an interrupted deletion leaves no checkpoint
            shutil.rmtree(entry.path)
    except OSError:
        pass
    return not entry.path.exists()


def _best(entries: Sequence[CheckpointEntry]) -> set[str]:
    """Return the names of the checkpoints that trainers recorded as their best."""
    names = set()
    for entry in entries:
        if entry.state is not CheckpointState.published:
            continue
        try:
            best = json.loads((entry.path / "trainer_state.json").read_bytes()).get("best_model_checkpoint")
        except (OSError, ValueError, AttributeError):
            continue  # written by another trainer, which records no best checkpoint
        if isinstance(best, str):
            names.add(Path(best).name)
    return names
