"""`grpo-run rehearse [options of launch] SCRIPT.py ...`: will the job survive? Faults in short runs of it.

Separates its own options from those of `launch`, makes a work directory, lets `runtime/rehearsal/` run the
job, and prints the table. Touches nothing of the real run.
"""

from __future__ import annotations

import shutil
import signal
import sys
import tempfile
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo_run.cli.command_parser import CommandParser
from grpo_run.cli.launching.options import OptionWords, build_parser
from grpo_run.runtime.errors import UsageError

OWN = ("--for", "--only", "--keep-files", "--free-server")
SET_HERE = (
    "--run-id", "--run-dir", "--on-end", "--notify", "--heartbeat-url", "--metrics-addr", "--inject",
    "--resume-from", "--show-ranks", "--snapshot-dir", "--fresh", "--strict-faults", "--require-resume",
    "--accept-change",
)  # fmt: skip
"""Options of the real run that mean nothing to a rehearsal, or that it sets itself."""
INDENT = 13  # longer than the names of the drills


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
    parent = own.get("--snapshot-dir", "/dev/shm")
    beside, rows = None, list[Any]()
    try:
        if parent != "off":
            beside = Path(tempfile.mkdtemp(prefix="grpo-run-rehearse-", dir=parent))
        job = Job(options=options, script=script, snapshots=beside, free_server=own.get("--free-server", ""))
        began = time.monotonic()

        def say(text: str) -> None:
            print(f"[{time.monotonic() - began:4.0f} s] {text}", file=sys.stderr, flush=True)

        for row in RehearsalRuns(job, work=work, seconds=seconds, say=say).rows(drills):
            rows.append(row)
    except OSError as error:
        raise UsageError(f"the rehearsal cannot be run: {error}") from error
    except KeyboardInterrupt:
        print_rows([*rows, judgement.Row(name="the rest", done="interrupted", held=None)])
        raise
    finally:
        from grpo_run.runtime.rehearsal.children import end_all

        try:
            end_all(0.0)
        finally:
            for folder in (beside, None if "--keep-files" in own else work):
                if folder is not None:
                    shutil.rmtree(folder)
    print_rows(rows)
    return judgement.exit_code(rows)


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
    """Print what was done, seen and lost, and what to do: wrapped on a terminal, in whole lines elsewhere."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize
    names: dict[str, list[str]] = {}
    for row in rows:
        mark = {True: "held", False: "FAILED", None: "not run" if row.applies else "n/a"}[row.held]
        names.setdefault(mark, []).append(row.name)
        seconds = "" if row.seconds is None else f"{row.seconds:.0f} s"
        parts = {"weights": row.weights, "lost:": row.lost}
        text = "; ".join(f"{label} {value}" for label, value in parts.items() if value)
        lines = [f"{row.name:<{INDENT}}{mark:<8}{seconds:>5}  {text}".rstrip()]
        for label, value in {"done": row.done, "seen": row.seen, "to do": row.advice}.items():
            lines += [f"{'':<{INDENT}}{label}: {value}"] if value else []
        for line in lines:
            print(textwrap.fill(line, width, subsequent_indent=" " * (INDENT + 2), break_on_hyphens=False))
    bad = [f"{mark}: {', '.join(names[mark])}." for mark in ("FAILED", "not run") if mark in names]
    print(" ".join(["", *bad]).strip() or "Everything held.")


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
        usage="grpo-run rehearse [--for 10m] [--only kill,term] [options of grpo-run launch] SCRIPT.py ...",
        description=(
            "Run a few steps of the job twice without a fault, then with one fault after another, and compare"
            " the weights. Nothing of the real run is touched. Exit code 0 only if everything held."
        ),
        epilog="Every option of `grpo-run launch` may be given, for one host.",
    )
    parser.add_argument("script", help="script as for `grpo-run launch`, with its arguments")
    add = parser.add_argument
    add("--for", metavar="TIME", help="how long it may take, such as 90s or 5m (default: 10m)")
    add("--only", metavar="NAMES", help="drills, separated by commas: kill, hang, term, server, tool, oom,"
        " supervisor, checkpoint, snapshots (default: all)")  # fmt: skip
    add("--keep-files", metavar="DIR", help="keep the runs' files in this empty directory (default: none)")
    add("--free-server", metavar="URL", help="a rollout server that the script names and no run uses: it is"
        " sent weights (default: the rehearsal of a script that names one is refused)")  # fmt: skip
    return parser
