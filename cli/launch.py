"""`grpo-run launch [options] SCRIPT.py [script arguments]`: run a training script under supervision.

Connects the parts of one run: forkserver, supervisor, agent, terminal, metrics and signals. The command line
is parsed in `launch_options/`, the agent is built in `elastic.py`.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import secrets
import signal
import stat
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_run.cli.elastic import build_agent
from grpo_run.cli.launch_options import staging
from grpo_run.cli.launch_options.parse import LaunchCommand, parse
from grpo_run.cli.launch_options.resume_from import check_against_run
from grpo_run.cli.launch_options.run_inputs import ChangedFiles, check_inputs, inputs_of
from grpo_run.cli.run_end.end_record import end_record, status_or_none
from grpo_run.cli.run_end.last_scrapes import await_last_scrapes, leave_at
from grpo_run.cli.run_end.on_end import run_on_end
from grpo_run.runtime.board.stop_requests import StopRequests
from grpo_run.runtime.catalog.registry import register, registry_folder
from grpo_run.runtime.continuity.fresh_seeds import orders_of
from grpo_run.runtime.errors import (
    EXIT_FINISHED,
    EXIT_GAVE_UP,
    EXIT_USAGE,
    ProcessError,
    UsageError,
)
from grpo_run.runtime.files import short_path
from grpo_run.runtime.host_memory.own_cgroup import OwnCgroup
from grpo_run.runtime.launch.git_commit import commit_of
from grpo_run.runtime.launch.rank_settings import RankSettings
from grpo_run.runtime.launch.sources.trainer_use import may_use_trainer
from grpo_run.runtime.processes import forkserver
from grpo_run.runtime.processes.adoption import adopt_orphans, own_children
from grpo_run.runtime.processes.helpers import Helpers
from grpo_run.runtime.record.history import History
from grpo_run.runtime.record.journal import read_journal
from grpo_run.runtime.record.run_directory import RunDirectory
from grpo_run.runtime.staging.area import StagingArea
from grpo_run.runtime.supervision import last_resort
from grpo_run.runtime.supervision.ending.earlier import end_earlier, own_identity
from grpo_run.runtime.supervision.ending.guardian import Guardian
from grpo_run.runtime.supervision.memory.allocator import expandable_segments
from grpo_run.runtime.supervision.memory.run_memory import config_for_ranks
from grpo_run.runtime.supervision.supervisor import Supervisor
from grpo_run.watchdog.observation import Phase
from grpo_run.watchdog.run_processes.ownership import TOKEN_VARIABLE, RunProcesses
from grpo_run.watchdog.run_processes.remaining import RemainingProcesses

if TYPE_CHECKING:
    from grpo_run.dashboards.metrics.address import Listener
    from grpo_run.dashboards.metrics.server import MetricsServer
    from grpo_run.dashboards.terminal.terminal import Terminal

PRELOAD = ("grpo_run.trainers.preload",)
FLIGHT_RECORDER = "TORCH_FR_BUFFER_SIZE"
RECORDED_COLLECTIVES = 256
"""Entries of torch's flight recorder per rank. They cover several steps; all of them (120 KB) are read in a
hang."""
SERVER_STOP_SECONDS = 2.0

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class _StoppedWithoutRanks(BaseException):
    """Raised by a signal while the agent waits for other nodes: no rank exists, so nothing has to be saved."""


def main(arguments: Sequence[str]) -> int:
    """Launch and supervise; returns the run's exit code."""
    return run(parse(arguments))


def run(launch: LaunchCommand) -> int:
    """Supervise one run until it ends."""
    config = launch.config
    with contextlib.ExitStack() as stack:
        # before anything is created: an address that cannot be used leaves nothing behind
        listener = open_listener(launch)
        if listener is not None:
            stack.enter_context(listener.socket)
        directory = RunDirectory(path=config.run_directory)
        changed = directory.create()
        if changed is not None:
            print(f"grpo-run: {changed}", file=sys.stderr)
        stack.callback(os.close, directory.acquire())
        try:
            return _resume_or_supervise(launch, directory, listener)
        except (UsageError, KeyboardInterrupt, BrokenPipeError):
            raise
        except Exception as error:  # noqa: BLE001 - of grpo-run itself, before or after the supervisor's own handler
            sentence = last_resort.describe(error)
            report = last_resort.write_report(directory.incidents, error, step=0, part="`grpo-run launch`")
            print(f"grpo-run: grpo-run itself failed: {sentence}. Report: {report}", file=sys.stderr)
            if launch.on_end is not None:
                record = end_record(
                    run_id=config.run_id, directory=directory.path, state="failed", exit_code=EXIT_GAVE_UP,
                    sentence=f"grpo-run itself failed: {sentence}.", status=status_or_none(directory),
                )  # fmt: skip
                run_on_end(
                    launch.on_end,
                    record,
                    warn=lambda text: print(f"grpo-run: warning: {text}", file=sys.stderr),
                )
            return EXIT_GAVE_UP


def _resume_or_supervise(launch: LaunchCommand, directory: RunDirectory, listener: Listener | None) -> int:
    config = launch.config
    history = History.of(read_journal(directory.journal))
    inputs = inputs_of(launch)
    check_inputs(launch, directory, history, inputs)
    check_against_run(config, directory, history)
    if history.finished:
        kept = staging.find(directory, config.run_id)
        if kept is not None:  # the disk was full when the run finished
            staging.write_kept_checkpoints(kept, directory, config.run_id)
        print(f"grpo-run: run {config.run_id} has finished. Use --fresh to start a new run.")
        return EXIT_FINISHED
    fields = {
        "working_directory": os.getcwd(), "typed": list(launch.typed), "inputs": inputs.as_json(),
        "git_commit": commit_of(launch.sources[0].path.parent),
    }  # fmt: skip
    register(directory.path, registry_folder())
    with staging.staged(launch, directory, fields) as staged:
        return _supervise(staged, directory, listener, ChangedFiles(launch, inputs))


def open_listener(launch: LaunchCommand) -> Listener | None:
    """Open the port of the metrics server; None if there is none.

    Raises:
        UsageError: the address cannot be used.
    """
    if launch.metrics_address == "off":
        return None
    from grpo_run.dashboards.metrics import address

    return address.open_listener(launch.metrics_address)


def _supervise(
    launch: LaunchCommand, directory: RunDirectory, listener: Listener | None, changed_files: ChangedFiles
) -> int:
    config = launch.config
    os.environ.update(config.environment)
    token = secrets.token_hex(16)
    # setproctitle would overwrite the environment that /proc shows, and the token with it
    marks = {TOKEN_VARIABLE: token, "SPT_NOENV": "1"}
    owned = RunProcesses(
        os.getpid(),
        os.getsid(0),
        tokens=(token,),
        started_by_supervisor=own_children,
        adopts_only_ours=adopt_orphans(),
    )
    cgroup = OwnCgroup.make()
    atexit.register(cgroup.remove)  # whichever way this process ends
    if config.preload:
        cgroup.enter(forkserver.start_server(PRELOAD, marks))
    from torch.distributed import DistError
    from torch.distributed.elastic.rendezvous import RendezvousError

    from grpo_run.dashboards.terminal.terminal import Terminal
    from grpo_run.runtime.processes.output import OutputFollower

    supervisor: Supervisor | None = None
    terminal = Terminal(
        shown_ranks=config.shown_ranks, status=lambda: supervisor.status() if supervisor is not None else None
    )
    output = OutputFollower(terminal.rank_line)

    def follow(files: dict[int, Path]) -> None:
        output.follow(files)
        change = changed_files.since_last_attempt()
        if change is not None:
            terminal.notify(change)
        terminal.attempt_begins()

    ranks = int(launch.elastic.nproc_per_node)
    remaining = RemainingProcesses(owned, keep=config.keep)
    supervisor = Supervisor(
        config,
        directory,
        local_world_size=ranks,
        rank_environment=lambda *of_rank: {**marks, **_rank_environment(*of_rank)},
        notify=terminal.notify,
        observe_exit=remaining.observe,
        follow_output=follow,
        staging=StagingArea(config.snapshot_directory) if config.snapshot_directory is not None else None,
        enter_cgroup=cgroup.enter,
    )
    guardian = Guardian(
        directory.journal, config.run_id, tokens=(token,), keep=config.keep, cgroup=cgroup.folder
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
    agent = build_agent(launch, supervisor, helpers)
    server = announce(launch, directory, supervisor, terminal, listener)
    terminal.start()
    output.start()
    stop_signals: list[float] = []
    stops = StopRequests(lambda: supervisor.board, _stop_by_signal)
    try:
        stop_signals = _handle_signals(supervisor)
        stops.start()
        _report_failed_threads(supervisor)
        supervisor.begin(
            world_size_local=ranks,
            may_use_trainer=may_use_trainer(launch.sources),
            accept_change=launch.accept_change,
        )
        supervisor.report_terminated(end_earlier(directory.processes, own_identity(token), config.keep))
        agent.run()
    except _StoppedWithoutRanks as stopped:
        supervisor.stop_without_ranks(str(stopped))
    except (ProcessError, RendezvousError, DistError) as error:
        # ranks could not be started, or the nodes could not meet
        supervisor.give_up(f"{type(error).__name__}: {' '.join(str(error).split())[:500]}")
    except UsageError:
        raise
    except Exception as error:  # noqa: BLE001 - an error of grpo-run ends the run in order, with a report
        supervisor.fail(error)
    finally:
        for part in (guardian.end, cgroup.remove, output.stop, terminal.stop):
            try:
                part()
            except Exception as error:  # noqa: BLE001 - how the run has ended does not depend on its display
                supervisor.note_thread_failure(part.__qualname__, error)
    if supervisor.exit_code is None:
        supervisor.give_up("another node closed the rendezvous before this node had ranks")
    assert supervisor.exit_code is not None
    supervisor.held.end(finished=supervisor.exit_code == EXIT_FINISHED)  # no rank can remove any more
    terminal.show_end(
        supervisor.sentence, wrong_usage=supervisor.exit_code == EXIT_USAGE, run_directory=directory.path
    )
    ended_at, signals = time.monotonic(), _note_signals()
    if launch.on_end is not None:
        status = supervisor.status()
        record = end_record(
            run_id=config.run_id, directory=directory.path, state=status.state, exit_code=supervisor.exit_code,
            sentence=supervisor.sentence, status=status,
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
    stops.end()
    _ignore_signals()
    return supervisor.exit_code


def announce(
    launch: LaunchCommand,
    directory: RunDirectory,
    supervisor: Supervisor,
    terminal: Terminal,
    listener: Listener | None,
) -> MetricsServer | None:
    """Start the metrics server if it has a socket, and print where the run and its metrics are."""
    place = f"run {launch.config.run_id} in {short_path(directory.path)}"
    mode = stat.S_IMODE(directory.path.stat().st_mode)
    server = None
    if listener is None:
        terminal.notify(place)
    else:
        from grpo_run.dashboards.metrics.server import start

        server = start(supervisor.status, listener)
        host, port = server.address
        terminal.notify(f"{place}, metrics on http://{host}:{port}/metrics")
        if server.open_to_network:
            terminal.notify("warning: the metrics can be read from the network, without authentication")
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        terminal.notify(
            f"warning: other users can write to {short_path(directory.path)} (mode {mode:04o}), so they can replace"
            " the files of the run; use a directory of mode 0700"
        )
    return server


def _handle_signals(supervisor: Supervisor) -> list[float]:
    """Turn SIGTERM, SIGINT and SIGHUP into a stop request; SIGHUP stays ignored under nohup.

    Returns:
        a list to which the time of each signal is added, in monotonic seconds.
    """
    received: list[float] = []

    def on_signal(number: int, frame: object) -> None:
        received.append(time.monotonic())
        if not supervisor.has_ranks:
            raise _StoppedWithoutRanks(signal.Signals(number).name)
        supervisor.stop.note(signal.Signals(number).name)

    for number in STOP_SIGNALS:
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, on_signal)
    return received


def _stop_by_signal() -> None:
    """Ask this process to stop as a signal from outside does: every wait of the main thread ends."""
    main_thread = threading.main_thread().ident
    assert main_thread is not None
    signal.pthread_kill(main_thread, signal.SIGTERM)


def _report_failed_threads(supervisor: Supervisor) -> None:
    """Report an exception that ends a thread once, with a traceback in a file instead of on the terminal."""

    def report(failure: threading.ExceptHookArgs) -> None:
        name = failure.thread.name if failure.thread is not None else "a thread"
        if failure.exc_value is not None:
            supervisor.note_thread_failure(name, failure.exc_value)

    threading.excepthook = report


def _note_signals() -> list[int]:
    """Return a list to which the signals that arrive from now on are added: they end what is left to wait for."""
    signals: list[int] = []
    for number in STOP_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda received, frame: signals.append(received))
    return signals


def _ignore_signals() -> None:
    """Keep the exit code that was decided: Python restores the default handlers while it exits."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _rank_environment(supervisor: Supervisor, rank: int, world_size: int) -> dict[str, str]:
    """Return the environment variables that the bootstrap of one rank reads."""
    config, files = supervisor.config, supervisor.attempt.files
    plan = supervisor.history.memory.plan
    settings = RankSettings(
        config=config_for_ranks(config, plan),
        attempt=supervisor.attempt.number,
        run_started_at=supervisor.run_started_at,
        log=str(files.log(rank)),
        stacks=str(files.stacks(rank)),
        socket=str(files.socket(rank)),
        error=str(files.error(rank)),
        preloaded=config.preload,
        parent_pid=os.getpid(),
        title=f"grpo-run rank {rank}/{world_size}: {config.target} {' '.join(config.arguments)}".rstrip(),
        failure_seconds=supervisor.history.mean_time_between_failures(),
        known_calls=supervisor.history.calls.to_pass(),
        attempt_started_at=time.time(),
        expected_snapshot=supervisor.expected_snapshot,
        fresh_seeds=orders_of(supervisor.history.recoveries),
        injections_fired=tuple(supervisor.history.injections_fired),
        quarantine=supervisor.quarantine.prompts,
        suspected_rollout=supervisor.quarantine.suspected,
        prompts=str(files.prompts(rank)),
        moved_rewards=tuple(supervisor.history.rewards.moved),
        reward_durations=supervisor.history.phase_records.get(Phase.reward.name),
        memory_plan=plan,
    )
    environment = settings.to_environment()
    if plan.expandable_segments:
        environment |= expandable_segments({**os.environ, **config.environment})
    if FLIGHT_RECORDER not in config.environment:
        environment[FLIGHT_RECORDER] = str(RECORDED_COLLECTIVES)
    return environment
