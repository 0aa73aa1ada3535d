"""`grpo-run launch [torchrun's flags] [our flags] script.py [arguments]`: run a training script under supervision.

Wires one run: forkserver, supervisor, agent, terminal, metrics, signals. What may be written on the command line
is `options.py`.
"""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Sequence
from typing import Any

from grpo_run.cli.launch_options.parse import LaunchCommand, parse
from grpo_run.cli.launch_options.processes import node_range
from grpo_run.runtime.errors import EXIT_FINISHED, ProcessError, UsageError
from grpo_run.runtime.launch.rank_settings import RankSettings
from grpo_run.runtime.processes import forkserver
from grpo_run.runtime.record.history import History
from grpo_run.runtime.record.journal import Journal, read_journal
from grpo_run.runtime.record.run_directory import RunDirectory
from grpo_run.runtime.staging.area import StagingArea
from grpo_run.runtime.supervision.supervisor import Supervisor

ENTRY = "grpo_run.trainers.bootstrap:main"
PRELOAD = ("grpo_run.trainers.preload",)
FLIGHT_RECORDER = "TORCH_FR_BUFFER_SIZE"
RECORDED_COLLECTIVES = 256
"""Several steps' worth; the whole ring is fetched while ranks stand still, 120 KB a rank."""


class _StoppedWithoutRanks(BaseException):
    """A signal while the agent waits for other nodes: nothing is lost by leaving at once."""


def main(arguments: Sequence[str]) -> int:
    """Launch and supervise; returns the run's exit code."""
    launch = parse(arguments)
    return run(launch)


def run(launch: LaunchCommand) -> int:
    """Supervise one run from here to its end."""
    config = launch.config
    directory = RunDirectory(path=config.run_directory)
    directory.create()
    lock = directory.acquire()
    try:
        history = History.of(read_journal(directory.journal))
        if history.finished:
            _write_what_was_kept(launch, directory, history)
            print(f"grpo-run: run {config.run_id} has finished; nothing to do. Start another with --fresh.")
            return EXIT_FINISHED
        return _supervise(launch, directory, history)
    finally:
        os.close(lock)


def _write_what_was_kept(launch: LaunchCommand, directory: RunDirectory, history: History) -> None:
    """Put on disk what a full one had left in memory when the run ended."""
    path = launch.config.snapshot_directory
    if path is None or not path.is_dir():
        return
    from grpo_run.runtime.staging.drain_scheduler import DrainScheduler

    def say(text: str) -> None:
        print(f"grpo-run: {text}")

    staging = StagingArea(path)
    if not staging.belongs_to(history.supervisors):
        staging.clear()  # the run ended on another machine: this is older
        return
    drains = DrainScheduler(
        staging, write=Journal(directory.journal, launch.config.run_id).write, warn=say, preloaded=False
    )
    drains.flush(restore=False)
    drains.close()


def _supervise(launch: LaunchCommand, directory: RunDirectory, history: History) -> int:
    config = launch.config
    os.environ.update(config.environment)
    if config.preload:
        forkserver.start_server(PRELOAD)
    from torch.distributed import DistError
    from torch.distributed.elastic.rendezvous import RendezvousError

    from grpo_run.dashboards.terminal import Terminal, progress_line
    from grpo_run.runtime.processes.output import OutputFollower

    supervisor: Supervisor | None = None
    terminal = Terminal(
        shown=config.shown_ranks, progress=lambda: progress_line(supervisor.history) if supervisor else ""
    )
    output = OutputFollower(terminal.rank_line)
    if not directory.run_json.exists():
        directory.write_run(config.as_json())
    staging = None
    if config.snapshot_directory is not None:
        staging = StagingArea(config.snapshot_directory)
    supervisor = Supervisor(
        config,
        directory,
        local_world_size=int(launch.elastic.nproc_per_node),
        rank_environment=_rank_environment,
        notify=terminal.say,
        follow_output=output.follow,
        staging=staging,
    )
    agent = _build_agent(launch, supervisor)
    server = None
    if launch.metrics_address != "off":
        from grpo_run.dashboards.metrics.server import start

        server = start(supervisor.status, launch.metrics_address)
        host, port = server.address
        terminal.say(f"run {config.run_id} in {directory.path}, metrics on http://{host}:{port}/metrics")
    else:
        terminal.say(f"run {config.run_id} in {directory.path}")

    def on_signal(number: int, frame: object) -> None:
        if not supervisor.has_ranks:
            raise _StoppedWithoutRanks(signal.Signals(number).name)
        supervisor.note_stop(signal.Signals(number).name)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # as nohup wished
            signal.signal(number, on_signal)
    terminal.start()
    output.start()
    try:
        supervisor.begin(world_size_local=int(launch.elastic.nproc_per_node))
        if staging is not None:
            # now: one that could not begin must leave memory to the next
            staging.claim(history.supervisors, directory.path)
        agent.run()
    except _StoppedWithoutRanks as stopped:
        supervisor.stop_without_ranks(str(stopped))
    except (ProcessError, RendezvousError, DistError) as error:
        # no ranks to run with: the processes, the nodes or the network between them
        supervisor.give_up(f"{type(error).__name__}: {' '.join(str(error).split())[:500]}")
    finally:
        output.stop()
        terminal.stop()
        if server is not None:
            server.stop(2.0)
    if supervisor.exit_code is None:
        supervisor.give_up("the rendezvous was closed by another node before this one had ranks")
    terminal.say(supervisor.sentence)
    assert supervisor.exit_code is not None
    return supervisor.exit_code


def _rank_environment(supervisor: Supervisor, rank: int, world_size: int) -> dict[str, str]:
    """What our bootstrap needs to know in one rank."""
    config = supervisor.config
    settings = RankSettings(
        config=config,
        attempt=supervisor.attempt.number,
        run_started_at=supervisor.run_started_at,
        log=str(supervisor.attempt.files.log(rank)),
        stacks=str(supervisor.attempt.files.stacks(rank)),
        socket=str(supervisor.attempt.files.socket(rank)),
        error=str(supervisor.attempt.files.error(rank)),
        preloaded=config.preload,
        parent_pid=os.getpid(),
        title=f"grpo-run rank {rank}/{world_size}: {config.target} {' '.join(config.arguments)}".rstrip(),
        failure_seconds=supervisor.history.mean_time_between_failures(),
        injections_fired=tuple(supervisor.history.injections_fired),
    )
    environment = settings.to_environment()
    if FLIGHT_RECORDER not in config.environment:
        environment[FLIGHT_RECORDER] = str(RECORDED_COLLECTIVES)
    return environment


def _build_agent(launch: LaunchCommand, supervisor: Supervisor) -> Any:
    """Torch elastic's rendezvous from torchrun's flags, and our agent on it."""
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous import registry as rendezvous_registry
    from torch.distributed.run import config_from_args

    from grpo_run.runtime.processes.agent import Agent

    options = launch.elastic
    alone = options.rdzv_backend == "static" and not options.rdzv_endpoint and options.master_port is None
    if options.standalone or (alone and node_range(options)[1] == 1):
        options.rdzv_backend, options.rdzv_endpoint, options.rdzv_id = (
            "c10d",
            "localhost:0",
            str(uuid.uuid4()),
        )
    if options.master_port is None:
        options.master_port = 29500
    restarts, options.max_restarts = options.max_restarts, options.max_restarts or 0
    try:
        elastic, _, _ = config_from_args(options)
    except (ValueError, AssertionError, RuntimeError) as error:
        raise UsageError(str(error)) from error
    handler = rendezvous_registry.get_rendezvous_handler(
        RendezvousParameters(
            backend=elastic.rdzv_backend,
            endpoint=elastic.rdzv_endpoint,
            run_id=elastic.run_id,
            min_nodes=elastic.min_nodes,
            max_nodes=elastic.max_nodes,
            local_addr=elastic.local_addr,
            **elastic.rdzv_configs,
        )
    )
    spec = WorkerSpec(
        role=elastic.role,
        local_world_size=elastic.nproc_per_node,
        entrypoint=launch.config.target,
        args=(),
        rdzv_handler=handler,
        max_restarts=restarts if restarts is not None else launch.config.budget.failures_without_progress,
        monitor_interval=elastic.monitor_interval,
        local_addr=elastic.local_addr,
        virtual_local_rank=elastic.virtual_local_rank,
    )
    return Agent(
        spec,
        controller=supervisor,
        entry=ENTRY,
        environment={
            **launch.config.environment,
            "TORCHELASTIC_SIGNALS_TO_HANDLE": options.signals_to_handle,
        },
        preloaded=launch.config.preload,
        elastic=elastic.max_nodes > 1,
        term_seconds=launch.config.timeouts.term_seconds,
    )
