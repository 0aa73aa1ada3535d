"""Supervise one run: connect its parts, announce it, and run the agent to the end.

Called by `cli/launch.py` under the lock of the run directory. Connects forkserver, supervisor, agent,
terminal, metrics and signals. The order is fixed: what the run starts is marked first, the ranks start
last, and after their end nothing changes the exit code. `announce` prints the run directory, the address of
the metrics, and who else can reach either; it starts the metrics server, because the address is the
server's. Decides nothing (`runtime/supervisor/`).
"""

from __future__ import annotations

import functools
import gc
import os
import re
import secrets
import stat
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_run.cli.launching._log_files import LogFiles
from grpo_run.cli.launching._ranks import build_agent, own_processes
from grpo_run.cli.launching.command import LaunchCommand
from grpo_run.cli.launching.identity import ChangedFiles
from grpo_run.cli.launching.notifications import Notifier
from grpo_run.cli.launching.on_end import await_last_scrapes, end_record, leave_at, run_on_end
from grpo_run.cli.launching.stop_signals import (
    StoppedWithoutRanks,
    handle_signals,
    ignore_signals,
    note_signals,
    stop_by_signal,
)
from grpo_run.dashboards.metrics.address import DEFAULT_ADDRESS, parse_address
from grpo_run.dashboards.metrics.server import MetricsServer, start
from grpo_run.runtime.board.stop_requests import StopRequests
from grpo_run.runtime.errors import EXIT_FINISHED, EXIT_USAGE, ProcessError, UsageError
from grpo_run.runtime.features import modules
from grpo_run.runtime.files import short_path
from grpo_run.runtime.history.run_directory import RunDirectory
from grpo_run.runtime.launch.config import Output
from grpo_run.runtime.launching.reading import history_parts
from grpo_run.runtime.processes.helpers import Helpers
from grpo_run.runtime.processes.starting import VARIABLE
from grpo_run.runtime.registry import announce_target, targets_folder
from grpo_run.runtime.snapshots.area import StagingArea
from grpo_run.runtime.supervisor.guardian import Guardian
from grpo_run.runtime.supervisor.previous_supervisor import end_previous, own_identity
from grpo_run.runtime.supervisor.supervisor import Supervisor
from grpo_run.watchdog.run_processes.remaining import RemainingProcesses

if TYPE_CHECKING:
    from grpo_run.dashboards.metrics.address import Listener
    from grpo_run.dashboards.terminal.background_output import BackgroundStream
    from grpo_run.dashboards.terminal.terminal import Terminal
    from grpo_run.runtime.processes.agent import Agent


def announce(
    launch: LaunchCommand,
    directory: RunDirectory,
    supervisor: Supervisor,
    terminal: Terminal,
    listener: Listener | None,
) -> MetricsServer | None:
    """Start the metrics server if it has a socket, and tell the user and Prometheus where it is."""
    place = f"run {launch.config.run_id} in {short_path(directory.path)}"
    mode = stat.S_IMODE(directory.path.stat().st_mode)
    server = None
    if listener is None:
        terminal.notify(place)
    else:
        server = start(supervisor.status, listener)
        host, port = server.address
        terminal.notify(f"{place}, metrics on http://{host}:{port}/metrics")
        asked = parse_address(launch.metrics_address)[1]
        if asked not in (0, port) and launch.metrics_address != DEFAULT_ADDRESS:
            terminal.notify(f"port {asked} is taken: the metrics are on the next free one, {port}")
        if server.open_to_network:
            terminal.notify("warning: the metrics can be read from the network, without authentication")
        targets = targets_folder()
        if not announce_target(directory.path, targets, target=server.target, run_id=launch.config.run_id):
            terminal.notify(f"Prometheus has to be told the address: {targets} cannot be written")
    if launch.config.output is Output.lines and not launch.config.shown_ranks:
        logs = short_path(directory.path / "attempts")
        terminal.notify(f"what the ranks print is in {logs}; --show-ranks all shows it here")
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        terminal.notify(
            f"warning: other users can write to {short_path(directory.path)} (mode {mode:04o}), so they can"
            " replace the files of the run; use a directory of mode 0700"
        )
    return server


SERVER_STOP_SECONDS = 2.0


def supervise(
    launch: LaunchCommand, directory: RunDirectory, listener: Listener | None, changed_files: ChangedFiles
) -> int:
    """Supervise one run until it ends. Nothing that is printed meanwhile waits for its reader.

    Args:
        launch: the command, with its staging area.
        directory: of the run, created and locked.
        listener: the socket of the metrics server; None if there is none.
        changed_files: reports files of the script that change while the run lasts.

    Returns:
        the exit code of the run.
    """
    from grpo_run.dashboards.terminal.background_output import BackgroundOutput

    printed = BackgroundOutput()
    # a reader of one stream does not wait for that of the other, unless both are one, which keeps the order
    errors = BackgroundOutput() if launch.config.output is Output.apart else printed
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = printed.stream(sys.stdout), errors.stream(sys.stderr)
    try:
        return _supervise(launch, directory, listener, changed_files)
    finally:
        sys.stdout, sys.stderr = before
        signals = note_signals()
        for output in (errors, printed):
            output.finish(lambda: bool(signals))
        ignore_signals()


def _supervise(
    launch: LaunchCommand, directory: RunDirectory, listener: Listener | None, changed_files: ChangedFiles
) -> int:
    config = launch.config
    os.environ.update({**config.environment, VARIABLE: launch.elastic.signals_to_handle})
    token = secrets.token_hex(16)
    marks, owned = own_processes(config, token)

    from grpo_run.dashboards.terminal.terminal import Terminal
    from grpo_run.runtime.processes.output import OutputFollower

    notifier = Notifier(launch.notify, launch.heartbeat_url, config.run_id)
    terminal = Terminal(
        shown_ranks=config.shown_ranks, passed_on=_passed_on(config.output), tell=notifier.tell
    )
    output = OutputFollower(terminal)

    logs = LogFiles(directory)
    logs.configure()
    remaining = RemainingProcesses(owned, keep=config.keep)

    def begin_attempt(files: dict[tuple[int, int], Path]) -> None:
        """Show what the ranks print, and whether the script has changed."""
        output.follow(files)
        change = changed_files.since_last_attempt()
        if change is not None:
            terminal.notify(change)
        terminal.show_faults()

    supervisor = Supervisor(
        config,
        directory,
        local_world_size=int(launch.elastic.nproc_per_node),
        notify=terminal.notify,
        observe_exit=remaining.observe,
        follow_output=begin_attempt,
        staging=StagingArea(config.snapshot_directory) if config.snapshot_directory is not None else None,
        log=logs.record,
        parts=history_parts(),
        features=[module.PART for module in modules("supervisor")],
    )
    guardian = Guardian(
        directory.journal, config.run_id, directory.host_memory, tokens=(token,), keep=config.keep
    )
    helpers = Helpers(
        owned,
        remaining,
        keep=config.keep,
        settings=config.deadlines,
        announce_ranks=guardian.begin_attempt,
        notify=terminal.notify,
        report=supervisor.report_terminated,
        interrupted=lambda: supervisor.stop.noted,
    )
    agent = build_agent(launch, supervisor, helpers, marks)
    server = announce(launch, directory, supervisor, terminal, listener)
    stops = StopRequests(lambda: supervisor.board, stop_by_signal)
    terminal.start(functools.partial(supervisor.status, complete=False))
    notifier.start(supervisor.history, terminal.notify)
    output.start()
    # what is imported stays: a full collection would visit it all, which takes 0.1 s of a core that ranks
    # need
    gc.freeze()
    try:
        stop_signals = _run_agent(agent, supervisor, stops, launch, directory, token)
    finally:
        for part in (guardian.end, output.stop, terminal.stop):
            try:
                part()
            except Exception as error:  # noqa: BLE001 - how the run has ended does not depend on its display
                supervisor.note_thread_failure(part.__qualname__, error)
    exit_code = _end(supervisor, terminal, directory)
    _after_end(launch, directory, supervisor, terminal, notifier, server, stop_signals)
    stops.end()
    return exit_code


def _passed_on(output: Output) -> dict[int, BackgroundStream]:
    """Return the streams that get the ranks' output byte for byte, by descriptor."""
    from grpo_run.dashboards.terminal.background_output import BackgroundStream

    taken = {Output.lines: {}, Output.merged: {1: sys.stdout}, Output.apart: {1: sys.stdout, 2: sys.stderr}}
    return {
        descriptor: stream
        for descriptor, stream in taken[output].items()
        if isinstance(stream, BackgroundStream) and not stream.isatty()
    }


def _run_agent(
    agent: Agent,
    supervisor: Supervisor,
    stops: StopRequests,
    launch: LaunchCommand,
    directory: RunDirectory,
    token: str,
) -> list[float]:
    """Run the agent until the run has ended, and tell the supervisor why if it ends in another way.

    Returns:
        when this process was asked to stop, in monotonic seconds.

    Raises:
        UsageError: the user's mistake, found late.
    """
    from torch.distributed import DistError
    from torch.distributed.elastic.rendezvous import RendezvousError

    stop_signals: list[float] = []
    try:
        stop_signals = handle_signals(supervisor)
        stops.start()
        _report_failed_threads(supervisor)
        supervisor.begin(
            world_size_local=int(launch.elastic.nproc_per_node), accept_change=launch.accept_change
        )
        supervisor.report_terminated(
            end_previous(directory.processes, own_identity(token), launch.config.keep)
        )
        agent.run()
    except StoppedWithoutRanks as stopped:
        supervisor.stop_without_ranks(str(stopped))
    except (ProcessError, RendezvousError, DistError) as error:
        # ranks could not be started, or the nodes could not meet
        supervisor.give_up(_not_started(error, launch))
    except UsageError:
        raise
    except Exception as error:  # noqa: BLE001 - an error of grpo-run ends the run in order, with a report
        supervisor.fail(error)
    return stop_signals


def _not_started(error: Exception, launch: LaunchCommand) -> str:
    """Return why there are no ranks, without the C++ frames that torch appends to its messages."""
    causes = [error]
    while (cause := causes[-1].__cause__) is not None and isinstance(cause, Exception):
        causes.append(cause)
    text = " ".join(
        re.split(r"Exception raised from|\bframe #0|C\+\+ CapturedTraceback", str(causes[-1]))[0].split()
    )
    said = f"{type(causes[-1]).__name__}: {text[:300]}".removesuffix(": ")
    if isinstance(error, ProcessError):
        return said
    endpoint = launch.elastic.rdzv_endpoint or f"{launch.elastic.master_addr}:{launch.elastic.master_port}"
    return (
        f"The hosts could not meet at {endpoint}: {said}. Check that the launch on that host runs and that"
        " its port can be reached from here; then start the same commands again."
    )


def _end(supervisor: Supervisor, terminal: Terminal, directory: RunDirectory) -> int:
    """Show how the run has ended, and return its exit code."""
    if supervisor.exit_code is None:
        supervisor.give_up("another node closed the rendezvous before this node had ranks")
    assert supervisor.exit_code is not None
    supervisor.backups.end(finished=supervisor.exit_code == EXIT_FINISHED)  # no rank can remove any more
    terminal.show_end(
        supervisor.sentence, wrong_usage=supervisor.exit_code == EXIT_USAGE, run_directory=directory.path
    )
    return supervisor.exit_code


def _after_end(
    launch: LaunchCommand,
    directory: RunDirectory,
    supervisor: Supervisor,
    terminal: Terminal,
    notifier: Notifier,
    server: MetricsServer | None,
    stop_signals: list[float],
) -> None:
    """Send the last message, run the command of `--on-end`, and let a scraper read the last state. A signal
    ends each."""
    ended_at, signals = time.monotonic(), note_signals()
    assert supervisor.exit_code is not None
    notifier.end(interrupted=lambda: bool(signals))
    if launch.on_end is not None:
        status = supervisor.status()
        record = end_record(
            run_id=launch.config.run_id, directory=directory.path, state=status.state,
            exit_code=supervisor.exit_code, sentence=supervisor.sentence, status=status,
        )  # fmt: skip
        run_on_end(
            launch.on_end,
            record,
            warn=functools.partial(supervisor.warn, None),
            interrupted=lambda: bool(signals),
        )
    if server is not None:
        await_last_scrapes(
            server,
            ended_at=ended_at,
            until=leave_at(stop_signals, stopped=supervisor.status().state == "stopped"),
            notify=terminal.notify,
            interrupted=lambda: bool(signals),
        )  # fmt: skip
        server.stop(SERVER_STOP_SECONDS)


def _report_failed_threads(supervisor: Supervisor) -> None:
    """Report an exception that ends a thread once, with a traceback in a file instead of on the terminal."""

    def report(failure: threading.ExceptHookArgs) -> None:
        name = failure.thread.name if failure.thread is not None else "a thread"
        if failure.exc_value is not None:
            supervisor.note_thread_failure(name, failure.exc_value)

    threading.excepthook = report
