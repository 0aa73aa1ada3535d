"""`grpo-run serve [RUN] [--address HOST:PORT]`: a live page of a run and of all runs of this user."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from grpo_run.cli.command_parser import CommandParser
from grpo_run.runtime.catalog import find_run, meant_run
from grpo_run.runtime.history.run_directory import DEFAULT_ROOT, RunDirectory
from grpo_run.runtime.registry import token_file

DEFAULT_ADDRESS = "127.0.0.1:9480"
LOWEST_NICENESS = 19
END_SECONDS = 1


def main(arguments: Sequence[str]) -> int:
    """Serve until interrupted; returns 0."""
    parser = CommandParser(
        prog="grpo-run serve",
        description="Serve a live page of all runs: verdict, ranks, curves, memory, incidents, checkpoints.",
        epilog=(
            "The address has a token, which is kept in ~/.local/state/grpo-run/serve.token. On another"
            " machine, forward the port: `ssh -L 9480:127.0.0.1:9480 HOST`."
        ),
    )
    parser.add_run("run directory, run id or folder of runs")
    parser.add_argument(
        "--address",
        metavar="HOST:PORT",
        default=DEFAULT_ADDRESS,
        help=f"where to listen (default: {DEFAULT_ADDRESS}, or the next free port)",
    )
    options = parser.parse_args(arguments)

    from starlette.routing import Route

    from grpo_run.dashboards.live.feed import RunList
    from grpo_run.dashboards.live.server import application
    from grpo_run.dashboards.live.token import read_token
    from grpo_run.dashboards.metrics.address import open_listener
    from grpo_run.dashboards.metrics.connections import http_server
    from grpo_run.dashboards.runbook import runbook

    root, run, follows = find(options.run)
    token = read_token(token_file())
    listener = open_listener(options.address, "--address", exactly=options.address != DEFAULT_ADDRESS)
    also = [Route("/runbook", runbook)]
    app = application(RunList(root, run), run, token, listener.accepts_host, follows=follows, also=also)
    yield_to_training()  # not before, or it could take long to start beside a training on all cores
    print(f"grpo-run: live page on http://{listener.target}/{token}/", flush=True)
    if listener.open_to_network:
        print(
            "grpo-run: other machines can connect, and what is sent is not encrypted: whoever sees the"
            " address can read the runs",
            file=sys.stderr,
        )
    http_server(app, listener.accepts_host, end_seconds=END_SECONDS).run(sockets=[listener.socket])
    return 0


def find(name: str | None) -> tuple[Path, RunDirectory, bool]:
    """Return the folder of runs, the run that is shown first, and whether it was not named: the active one is
    shown then.

    Args:
        name: a run directory, a run id or a folder of runs; None for `runs/`.

    Raises:
        RunDirectoryError: there is no such run.
    """
    folder = Path(name) if name is not None else DEFAULT_ROOT
    if not (folder / "run.json").is_file() and (meant := meant_run(folder)) is not None:
        return folder, meant, True
    return DEFAULT_ROOT, find_run(name), False


def yield_to_training() -> None:
    """Let this process and its threads run only while nothing else wants the processor."""
    with contextlib.suppress(OSError):  # a container may forbid it; niceness alone still helps
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    os.nice(LOWEST_NICENESS)
