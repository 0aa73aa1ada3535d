"""Supervise one run: connect its parts, announce it, and run the agent to the end.

Called by `launch.py` under the lock of the run directory. Connects forkserver, supervisor, agent, display and
signals. The order is fixed: what the run starts is marked first, the ranks start last, and after their end
nothing changes the exit code. Decides nothing (`runtime/supervisor/`).
"""

from __future__ import annotations

import functools
import gc
import os
import re
import secrets
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_run.runtime.board.stop_requests import StopRequests
from grpo_run.runtime.checkpoints import fencing
from grpo_run.runtime.errors import EXIT_FINISHED, EXIT_USAGE, HostsLostError, ProcessError, UsageError
from grpo_run.runtime.features import modules
from grpo_run.runtime.history.run_directory import RunDirectory
from grpo_run.runtime.launching._configuration import PreparedLaunch
from grpo_run.runtime.launching._identity import ChangedFiles
from grpo_run.runtime.launching._log_files import log_event, log_to_file
from grpo_run.runtime.launching._on_end import end_record, leave_at, run_on_end
from grpo_run.runtime.launching._ranks import build_agent, own_processes
from grpo_run.runtime.launching._stop_signals import (
    StoppedWithoutRanks,
    handle_signals,
    ignore_signals,
    note_signals,
    stop_by_signal,
)
from grpo_run.runtime.launching.display import Display, Screen
from grpo_run.runtime.launching.notifications import Notifier
from grpo_run.runtime.launching.reading import history_parts
from grpo_run.runtime.launching.request import RunResult
from grpo_run.runtime.processes.companion import companion_token
from grpo_run.runtime.processes.helpers import Helpers
from grpo_run.runtime.processes.identity import own_identity as own_process
from grpo_run.runtime.processes.starting import VARIABLE
from grpo_run.runtime.snapshots.area import StagingArea
from grpo_run.runtime.supervisor.guardian import Guardian
from grpo_run.runtime.supervisor.previous_supervisor import end_previous, own_identity
from grpo_run.runtime.supervisor.supervisor import Supervisor
from grpo_run.runtime.upstream import process_names
from grpo_run.watchdog.run_processes.remaining import RemainingProcesses

if TYPE_CHECKING:
    from grpo_run.runtime.processes.agent import Agent


def supervise(
    launch: PreparedLaunch, directory: RunDirectory, display: Display, changed_files: ChangedFiles
) -> RunResult:
    """Supervise one run until it ends. Nothing that is printed meanwhile waits for its reader.

    Args:
        launch: what was asked, with its staging area.
        directory: of the run, created and locked.
        display: shows the run; has been reserved.
        changed_files: reports files of the script that change while the run lasts.
    """
    try:
        return _supervise(launch, directory, display, changed_files)
    finally:
        signals = note_signals()
        display.finish(lambda: bool(signals))
        ignore_signals()


def _supervise(
    launch: PreparedLaunch, directory: RunDirectory, display: Display, changed_files: ChangedFiles
) -> RunResult:
    config = launch.config
    os.environ.update({**config.environment, VARIABLE: launch.elastic.signals_to_handle})
    token = secrets.token_hex(16)
    marks, owned = own_processes(config, token)

    from grpo_run.runtime.processes.output import OutputFollower

    notifier = Notifier(launch.options.notify, launch.options.heartbeat_url, config.run_id)
    screen = display.begin(config, notifier.tell)
    output = OutputFollower(screen)

    log_to_file(directory)
    remaining = RemainingProcesses(owned, keep=config.keep)

    def begin_attempt(files: dict[tuple[int, int], Path]) -> None:
        """Show what the ranks print, and whether the script has changed."""
        output.follow(files)
        change = changed_files.since_last_attempt()
        if change is not None:
            screen.notify(change)
        screen.show_faults()

    supervisor = Supervisor(
        config,
        directory,
        local_world_size=launch.ranks_per_node,
        notify=screen.notify,
        observe_exit=remaining.observe,
        follow_output=begin_attempt,
        staging=StagingArea(config.snapshot_directory) if config.snapshot_directory is not None else None,
        log=functools.partial(log_event, directory),
        parts=history_parts(),
        features=[module.PART for module in modules("supervisor")],
    )
    guardian = Guardian(
        directory.journal,
        config.run_id,
        tokens=(token, companion_token(own_process())),
        keep=config.keep,
        temporary=process_names.temporary_folder(),
    )
    helpers = Helpers(
        owned,
        remaining,
        keep=config.keep,
        settings=config.deadlines,
        announce_ranks=guardian.begin_attempt,
        notify=screen.notify,
        report=supervisor.report_terminated,
        interrupted=lambda: supervisor.stop.noted,
    )
    agent = build_agent(launch, supervisor, helpers, marks)
    display.announce(directory, supervisor.status)
    stops = StopRequests(lambda: supervisor.board, stop_by_signal)
    screen.start(functools.partial(supervisor.status, complete=False))
    notifier.start(supervisor.history, screen.notify)
    output.start()
    # what is imported stays: a full collection would visit it all, which takes 0.1 s of a core that ranks
    # need
    gc.freeze()
    try:
        stop_signals = _run_agent(agent, supervisor, stops, launch, directory, token)
    finally:
        note_signals()  # no signal may interrupt what follows

        def leave() -> None:
            alone = supervisor.leaves or not supervisor.has_ranks
            agent.leave(supervisor.exit_code, supervisor.sentence, alone=alone)

        for part in (leave, supervisor.end_features, guardian.end, output.stop, screen.stop):
            try:
                part()
            except Exception as error:  # noqa: BLE001 - how the run has ended does not depend on its display
                supervisor.note_thread_failure(part.__qualname__, error)
    _show_end(supervisor, screen, directory)
    status = supervisor.status()
    result = RunResult(
        exit_code=_code(supervisor), state=status.state, sentence=supervisor.sentence, run_id=config.run_id,
        run_directory=directory.path, status=status,
    )  # fmt: skip
    _after_end(launch.options.on_end, result, supervisor, display, notifier, stop_signals)
    stops.end()
    return result


def _run_agent(
    agent: Agent,
    supervisor: Supervisor,
    stops: StopRequests,
    launch: PreparedLaunch,
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
        supervisor.begin(world_size_local=launch.ranks_per_node, accept_change=launch.options.accept_change)
        supervisor.report_terminated(
            end_previous(directory.processes, own_identity(token), launch.config.keep)
        )
        agent.run()
    except StoppedWithoutRanks as stopped:
        note_signals()  # the next one must not interrupt the end of the run, here and below
        supervisor.stop_without_ranks(str(stopped))
    except HostsLostError as error:
        note_signals()
        supervisor.end_without_hosts(str(error), error.exit_code)
    except (ProcessError, RendezvousError, DistError) as error:
        # ranks could not be started, or the nodes could not meet
        note_signals()
        supervisor.give_up(_not_started(error, launch))
    except UsageError:
        raise
    except Exception as error:  # noqa: BLE001 - an error of grpo-run ends the run in order, with a report
        supervisor.fail(error)
    return stop_signals


def _not_started(error: Exception, launch: PreparedLaunch) -> str:
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


def _code(supervisor: Supervisor) -> int:
    assert supervisor.exit_code is not None
    return supervisor.exit_code


def _show_end(supervisor: Supervisor, screen: Screen, directory: RunDirectory) -> None:
    """Show how the run has ended."""
    if supervisor.exit_code is None:
        supervisor.give_up("another node closed the rendezvous before this node had ranks")
    code = _code(supervisor)
    supervisor.backups.end(finished=code == EXIT_FINISHED)  # no rank can remove any more
    fencing.close_recorded(directory.path, supervisor.config.snapshot_directory)
    screen.show_end(supervisor.sentence, wrong_usage=code == EXIT_USAGE, run_directory=directory.path)


def _after_end(
    on_end: str | None,
    result: RunResult,
    supervisor: Supervisor,
    display: Display,
    notifier: Notifier,
    stop_signals: list[float],
) -> None:
    """Send the last message, run the command of `--on-end`, and let a scraper read the last state. A signal
    ends each."""
    ended_at, signals = time.monotonic(), note_signals()
    notifier.end(interrupted=lambda: bool(signals))
    if on_end is not None:
        record = end_record(result)
        warn = functools.partial(supervisor.warn, None)
        run_on_end(on_end, record, warn=warn, interrupted=lambda: bool(signals))
    display.linger(
        ended_at=ended_at,
        until=leave_at(stop_signals, stopped=result.state == "stopped"),
        interrupted=lambda: bool(signals),
    )


def _report_failed_threads(supervisor: Supervisor) -> None:
    """Report an exception that ends a thread once, with a traceback in a file instead of on the terminal."""

    def report(failure: threading.ExceptHookArgs) -> None:
        name = failure.thread.name if failure.thread is not None else "a thread"
        if failure.exc_value is not None:
            supervisor.note_thread_failure(name, failure.exc_value)

    threading.excepthook = report
