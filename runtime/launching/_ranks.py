"""What starts the ranks: torch elastic's rendezvous and our agent, and the environment of each rank.

`build_agent` takes torchrun's options. `rank_environment` holds the settings that the bootstrap reads and
what torch reads; the agent calls it for each rank of each attempt, once the supervisor has prepared that.
`own_processes` sets the token that processes inherit, and the process that adopts orphans; it is called
before anything else is started, so that whatever the run starts is marked. Terminates nothing.
"""

from __future__ import annotations

import argparse
import os
import time
import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING

from grpo_run.runtime.errors import UsageError
from grpo_run.runtime.launch.config import Output, RunConfig
from grpo_run.runtime.launch.rank_settings import RankSettings
from grpo_run.runtime.launching._configuration import PreparedLaunch, node_range
from grpo_run.runtime.processes import forkserver
from grpo_run.runtime.processes.adoption import adopt_orphans, own_children
from grpo_run.runtime.processes.companion import companion_token
from grpo_run.runtime.processes.identity import own_identity
from grpo_run.runtime.processes.starting import VARIABLE
from grpo_run.runtime.supervisor.supervisor import Supervisor
from grpo_run.watchdog.run_processes.ownership import TOKEN_VARIABLE, RunProcesses

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler
    from torch.distributed.launcher.api import LaunchConfig

    from grpo_run.runtime.processes.agent import Agent
    from grpo_run.runtime.processes.helpers import Helpers


ENTRY = "grpo_run.runtime.launching.rank:main"
"""What a rank runs: the function that runs the user's script."""
LONELY_KEEP_ALIVE_SECONDS = 60
"""How often a node without others tells its rendezvous that it is alive, at a cost of 2 ms each; torch's
default is 5 s."""
BEAT_SECONDS = 1
LOST_BEATS = 20
"""torch drops a host that has not beaten for so long, should nothing else have proved its loss: what a
host sends during a cut of 8 s arrives up to 13 s later, and clocks may differ."""
NO_SHARED_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""Without it torch keeps the address of the store that rank 0's host has served to the ranks, and does not
tell it to a host that joins later: the newcomer waits for it in vain. Our ranks use another store."""
MASTER_PORT = 29500
"""torchrun's default."""


def build_agent(
    launch: PreparedLaunch, supervisor: Supervisor, helpers: Helpers, marks: Mapping[str, str]
) -> Agent:
    """Return an agent that starts ranks as torchrun would, controlled by the supervisor.

    A run on one node without an explicit rendezvous gets a rendezvous of its own on a free port.

    Args:
        marks: see `own_processes`.

    Raises:
        UsageError: torch elastic refuses its options.
    """
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.run import config_from_args, get_args_parser
    from torch.version import __version__ as torch_version

    from grpo_run.runtime.processes.agent import Agent

    options, config = argparse.Namespace(**vars(launch.elastic)), launch.config
    options.module, options.training_script, options.training_script_args = False, config.target, []
    explicit = options.rdzv_backend != "static" or options.rdzv_endpoint or options.master_port is not None
    for action in get_args_parser()._actions:  # what this torch has in addition
        if not hasattr(options, action.dest):
            if (variable := f"PET_{action.dest.upper()}") in os.environ:
                raise UsageError(f"{variable} is not supported with torch {torch_version}; unset it")
            setattr(options, action.dest, action.default)
    alone = options.standalone or (not explicit and node_range(launch.elastic)[1] == 1)
    if alone:
        options.rdzv_backend = "c10d"
        options.rdzv_endpoint = "localhost:0"
        options.rdzv_id = str(uuid.uuid4())
    if options.master_port is None:
        options.master_port = MASTER_PORT
    restarts, options.max_restarts = options.max_restarts, options.max_restarts or 0
    options.log_dir = os.devnull  # otherwise torch makes a temporary folder that nobody removes
    try:
        elastic, _, _ = config_from_args(options)
    except (ValueError, AssertionError, RuntimeError) as error:
        raise UsageError(str(error)) from error
    if alone:
        elastic.rdzv_configs.setdefault("keep_alive_interval", LONELY_KEEP_ALIVE_SECONDS)
    elif elastic.max_nodes > 1:
        os.environ.setdefault(NO_SHARED_STORE, "1")
        elastic.rdzv_configs.setdefault("keep_alive_interval", BEAT_SECONDS)
        elastic.rdzv_configs.setdefault("keep_alive_max_attempt", LOST_BEATS)
    ranged = elastic.min_nodes < elastic.max_nodes
    full_world_size = elastic.max_nodes * elastic.nproc_per_node if ranged else 0
    spec = WorkerSpec(
        role=elastic.role,
        local_world_size=elastic.nproc_per_node,
        entrypoint=config.target,
        args=(),
        rdzv_handler=_rendezvous(elastic),
        max_restarts=restarts if restarts is not None else config.budget.failures_without_progress,
        monitor_interval=elastic.monitor_interval,
        local_addr=elastic.local_addr,
        virtual_local_rank=elastic.virtual_local_rank,
        event_log_handler=_checked_handler(elastic.event_log_handler),
    )
    return Agent(
        spec,
        controller=supervisor,
        entry=ENTRY,
        environment={**config.environment, VARIABLE: options.signals_to_handle},
        variables=lambda rank, world_size: {
            **marks,
            **rank_environment(supervisor, rank, world_size, full_world_size),
        },
        preloaded=lambda: are_forked(supervisor),
        elastic=elastic.max_nodes > 1,
        helpers=helpers,
    )


def _checked_handler(name: str) -> str:
    """Return the name of a handler of torch elastic's events.

    Raises:
        UsageError: there is no handler of this name.
    """
    from torch.distributed.elastic.events.handlers import get_logging_handler

    try:
        get_logging_handler(name)
    except KeyError:
        raise UsageError(
            f"--event-log-handler {name}: torch has no such handler; use null or console"
        ) from None
    return name


def _rendezvous(elastic: LaunchConfig) -> RendezvousHandler:
    """Return the rendezvous that torch elastic's options ask for."""
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous import registry as rendezvous_registry

    from grpo_run.runtime.processes.meeting import Meeting

    parameters = RendezvousParameters(
        backend=elastic.rdzv_backend,
        endpoint=elastic.rdzv_endpoint,
        run_id=elastic.run_id,
        min_nodes=elastic.min_nodes,
        max_nodes=elastic.max_nodes,
        local_addr=elastic.local_addr,
        **elastic.rdzv_configs,
    )
    if elastic.max_nodes > 1 and elastic.rdzv_backend == "c10d" and parameters.get("store_type") != "file":
        return Meeting(parameters)
    return rendezvous_registry.get_rendezvous_handler(parameters)


FLIGHT_RECORDER = "TORCH_FR_BUFFER_SIZE"
RECORDED_COLLECTIVES = 256
"""Entries of torch's flight recorder per rank. They cover several steps; all of them (120 KB) are read in a
hang."""


def are_forked(supervisor: Supervisor) -> bool:
    """Return whether the ranks of the next attempt are forked from the warm interpreter."""
    return supervisor.config.preload and not supervisor.history.fresh_because


def rank_environment(
    supervisor: Supervisor, rank: int, world_size: int, full_world_size: int = 0
) -> dict[str, str]:
    """Return the environment variables that the bootstrap of one rank reads."""
    config, files = supervisor.config, supervisor.attempt.files
    settings = RankSettings(
        config=supervisor.config,
        attempt=supervisor.attempt.number,
        run_started_at=supervisor.run_started_at,
        log=str(files.log(rank)),
        errors=str(files.errors(rank)) if config.output is Output.apart else None,
        stacks=str(files.stacks(rank)),
        socket=str(files.socket(rank)),
        error=str(files.error(rank)),
        preloaded=are_forked(supervisor),
        parent_pid=os.getpid(),
        title=f"grpo-run rank {rank}/{world_size}: {config.target} {' '.join(config.arguments)}".rstrip(),
        failure_seconds=supervisor.history.mean_time_between_failures(),
        known_calls=supervisor.history.calls.to_pass(),
        attempt_started_at=time.time(),
        expected_snapshot=supervisor.expected_snapshot,
        loads_from_disk=supervisor.loads_from_disk,
        discarded=supervisor.discarded,
        features=supervisor.rank_settings(rank),
        full_world_size=full_world_size,
        cpus=config.rank_cpus[rank % len(config.rank_cpus)] if config.rank_cpus else (),
    )
    environment = settings.to_environment()
    for feature in supervisor.features:
        environment |= feature.rank_environment({**os.environ, **config.environment})
    if FLIGHT_RECORDER not in config.environment:
        environment[FLIGHT_RECORDER] = str(RECORDED_COLLECTIVES)
    return environment


PRELOAD = ("grpo_run.runtime.launching.preload", ENTRY.partition(":")[0])


def own_processes(config: RunConfig, token: str) -> tuple[dict[str, str], RunProcesses]:
    """Mark what this process starts as the run's, and start the forkserver if ranks are forked from one.

    Args:
        token: in the environment of everything that the run starts.

    Returns:
        the variables of a rank that carry the token, and the processes that have it.
    """
    # setproctitle would overwrite the environment that /proc shows, and the token with it
    marks = {TOKEN_VARIABLE: token, "SPT_NOENV": "1"}
    owned = RunProcesses(
        os.getpid(),
        os.getsid(0),
        tokens=(token,),
        companion=companion_token(own_identity()),
        started_by_supervisor=own_children,
        adopts_only_ours=adopt_orphans(),
    )
    if config.preload:
        forkserver.start_server(PRELOAD, marks)
    return marks, owned
