"""`grpo-run rehearse [options of launch] SCRIPT.py ...`: will the job survive? Faults in short runs of it.

Separates its own options from those of `launch`, makes a work directory, lets `runtime/rehearsal/` run the
job, and prints the table. Touches nothing of the real run.
"""

from __future__ import annotations

import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo_run.cli.command_parser import CommandParser
from grpo_run.cli.launching.options import OptionWords, build_parser
from grpo_run.runtime.errors import UsageError

OWN = ("--for", "--only", "--keep-files")
SET_HERE = (
    "--run-id", "--run-dir", "--on-end", "--notify", "--heartbeat-url", "--metrics-addr", "--inject",
    "--resume-from", "--show-ranks", "--snapshot-dir", "--fresh", "--strict-faults", "--require-resume",
    "--accept-change", "--on-resume-failure",
)  # fmt: skip
"""Options of the real run that mean nothing to a rehearsal, or that it sets itself."""
SNAPSHOTS = Path("/dev/shm")


def main(arguments: Sequence[str]) -> int:
    """Rehearse; 0 if everything held, 1 if something did not or was not run."""
    parser = _help_parser()
    parser.parse_args([word for word in arguments if word in ("-h", "--help")][:1] or ["script"])
    own, options, script = split(arguments, OptionWords(build_parser(), extra=OWN))
    if not script or script == ["-m"]:
        raise UsageError("rehearse takes a script; see grpo-run rehearse --help")
    from grpo_run.runtime.rehearsal import judgement
    from grpo_run.runtime.rehearsal.drills import chosen, seconds_of
    from grpo_run.runtime.rehearsal.rehearse import Job, RehearsalRuns

    drills, seconds = chosen(own.get("--only")), seconds_of(own.get("--for", "10m"))
    signal.signal(signal.SIGTERM, _end)
    work = _work_directory(own.get("--keep-files"))
    given = own.get("--snapshot-dir")
    snapshots = None if given == "off" else Path(given) if given else SNAPSHOTS
    beside = None
    try:
        if snapshots is not None:
            beside = Path(tempfile.mkdtemp(prefix="grpo-run-rehearse-", dir=snapshots))
        job = Job(options=options, script=script, snapshots=beside)
        began, rows = time.monotonic(), list[Any]()

        def say(text: str) -> None:
            print(f"[{time.monotonic() - began:4.0f} s] {text}", file=sys.stderr, flush=True)

        for row in RehearsalRuns(job, work=work, seconds=seconds, say=say).rows(drills):
            rows.append(row)
    except OSError as error:
        raise UsageError(f"the rehearsal cannot be run: {error}") from error
    finally:
        from grpo_run.runtime.rehearsal.children import end_all

        try:
            end_all(0.0)
        finally:
            for folder in (beside, None if "--keep-files" in own else work):
                if folder is not None:
                    shutil.rmtree(folder)
    print_rows(rows)
    code = judgement.exit_code(rows)
    print("Everything held." if code == 0 else "Not everything held, or was run; see the table.")
    return code


def split(arguments: Sequence[str], words: OptionWords) -> tuple[dict[str, str], list[str], list[str]]:
    """Return our own options, those of the launches, and the script with its arguments.

    Raises:
        UsageError: an option is unknown, or asks for several hosts.
    """
    own: dict[str, str] = {}
    options: list[str] = []
    rest = list(arguments)
    while option := words.next_option(rest):
        name, _, value = option[0].partition("=")
        name = name.replace("_", "-")
        value = option[1] if len(option) == 2 else value
        if name in ("-m", "--module"):
            return own, options, ["-m", *rest]
        if name == "--nnodes" and value != "1":
            raise UsageError(f"--nnodes {value}: a rehearsal runs on one host; leave it out")
        if name in OWN or name == "--snapshot-dir":
            own[name] = value
        elif name not in SET_HERE:
            options += option
    return own, options, rest[1:] if rest[:1] == ["--"] else rest


def print_rows(rows: Sequence[Any]) -> None:
    """Print what was done, seen and lost, and what to do."""
    from rich.console import Console
    from rich.table import Table

    table = Table(show_lines=True)
    for title in ("", "done", "seen", "seconds", "weights", "lost", "what to do"):
        table.add_column(title, overflow="fold")
    for row in rows:
        mark = {True: "held", False: "SHORT", None: "not run"}[row.held]
        seconds = "" if row.seconds is None else f"{row.seconds:.0f}"
        table.add_row(f"{row.name}: {mark}", row.done, row.seen, seconds, row.weights, row.lost, row.advice)
    Console(highlight=False, markup=False, width=max(Console().width, 160)).print(table)


def _end(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def _work_directory(kept: str | None) -> Path:
    if kept is None:
        return Path(tempfile.mkdtemp(prefix="grpo-run-rehearse-"))
    path = Path(kept).resolve()
    if path.exists() and any(path.iterdir()):
        raise UsageError(f"--keep-files {kept}: is not empty; give another directory")
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    return path


def _help_parser() -> CommandParser:
    parser = CommandParser(
        prog="grpo-run rehearse",
        usage="grpo-run rehearse [--for 5m] [--only kill,term] [options of grpo-run launch] SCRIPT.py ...",
        description=(
            "Run a few steps of the job twice without a fault, then with one fault after another, and compare"
            " the weights. Nothing of the real run is touched. Exit code 0 only if everything held."
        ),
        epilog="Every option of `grpo-run launch` may be given, for one host.",
    )
    parser.add_argument("script", help="script as for `grpo-run launch`, with its arguments")
    parser.add_argument(
        "--for", metavar="TIME", help="how long it may take, such as 90s or 5m (default: 10m)"
    )
    parser.add_argument(
        "--only", metavar="NAMES",
        help="drills: kill, hang, term, oom, supervisor, checkpoint, snapshots (default: all)",
    )  # fmt: skip
    parser.add_argument(
        "--keep-files",
        metavar="DIR",
        help="keep the files of the runs in this empty directory (default: none)",
    )
    return parser
