"""`grpo-run rm RUN ... [--force]`: delete run directories and the memory of their snapshots."""

from __future__ import annotations

from collections.abc import Sequence

from grpo_run.cli.command_parser import CommandParser
from grpo_run.cli.removal import remove_run
from grpo_run.runtime.catalog import find_run, links_of
from grpo_run.runtime.errors import RunDirectoryError
from grpo_run.runtime.files import short_path
from grpo_run.runtime.history.reader import RunReader
from grpo_run.runtime.history.run_directory import RunDirectory
from grpo_run.runtime.snapshots.ownership import recorded_areas
from grpo_run.runtime.snapshots.slot import STAGED


def main(arguments: Sequence[str]) -> int:
    """Delete runs; returns 0. Nothing is deleted if one of them must not be."""
    parser = CommandParser(
        prog="grpo-run rm",
        description=(
            "Delete run directories: journal, logs and incidents, and snapshots in memory. Checkpoints stay."
            " A live run is refused."
        ),
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run directory or run id")
    parser.add_argument(
        "--force",
        action="store_true",
        help="also delete a run whose newest state is only in memory, or in links to checkpoints",
    )
    options = parser.parse_args(arguments)
    found = {run.path.resolve(): run for run in map(find_run, options.runs)}
    for run in found.values():
        _check(run, force=options.force)
    for run in found.values():
        rest = remove_run(run)
        if rest:
            print(
                f"deleted the run in {short_path(run.path)}; other files in it stay, such as {rest[0].name}"
            )
        else:
            print(f"deleted {short_path(run.path)}")
    return 0


def _check(run: RunDirectory, *, force: bool) -> None:
    """Refuse to delete a run that is live, or whose newest state would be lost.

    Raises:
        RunDirectoryError: with what to do.
    """
    owner = run.owner()
    if owner is not None:
        raise RunDirectoryError(f"the run in {run.path} is live (supervisor {owner}); stop it first")
    status = RunReader(run).read()
    if force:
        return
    for links in links_of(run, status) if not status.history.finished else ():
        if links.missing:
            raise RunDirectoryError(
                f"{links.missing[0]} of the run in {run.path} is missing in {links.output_dir}, and is only"
                f" kept in {links.path}; `grpo-run gc` puts it back, and --force deletes it"
            )
    if any(any(area.glob(f"*/{STAGED}")) for area in recorded_areas(run.read_run())):
        raise RunDirectoryError(
            f"the newest state of the run in {run.path} is only in memory; `grpo-run gc` writes it to disk,"
            " and --force deletes it"
        )
