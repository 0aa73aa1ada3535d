"""Build torch elastic's rendezvous and our agent from torchrun's options. Called by `supervise.py`."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

from grpo_run.cli.launch_options.parse import LaunchCommand
from grpo_run.cli.launch_options.processes import node_range
from grpo_run.runtime.errors import UsageError
from grpo_run.runtime.processes.starting import VARIABLE
from grpo_run.runtime.supervisor.supervisor import Supervisor

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler
    from torch.distributed.launcher.api import LaunchConfig

    from grpo_run.runtime.processes.agent import Agent
    from grpo_run.runtime.processes.helpers import Helpers

ENTRY = "grpo_run.runtime.rank.bootstrap:main"
"""What a rank runs: the function that runs the user's script."""
LONELY_KEEP_ALIVE_SECONDS = 60
"""How often a node without others tells its rendezvous that it is alive, at a cost of 2 ms each; torch's default is
5 s."""
MASTER_PORT = 29500
"""torchrun's default."""


def build_agent(launch: LaunchCommand, supervisor: Supervisor, helpers: Helpers) -> Agent:
    """Return an agent that starts ranks as torchrun would, controlled by the supervisor.

    A run on one node without an explicit rendezvous gets a rendezvous of its own on a free port.

    Raises:
        UsageError: torch elastic refuses its options.
    """
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.run import config_from_args, get_args_parser

    from grpo_run.runtime.processes.agent import Agent

    options, config = launch.elastic, launch.config
    explicit = options.rdzv_backend != "static" or options.rdzv_endpoint or options.master_port is not None
    for action in get_args_parser()._actions:  # what this torch has in addition
        if not hasattr(options, action.dest):
            setattr(options, action.dest, action.default)
    alone = options.standalone or (not explicit and node_range(options)[1] == 1)
    if alone:
        options.rdzv_backend = "c10d"
        options.rdzv_endpoint = "localhost:0"
        options.rdzv_id = str(uuid.uuid4())
    if options.master_port is None:
        options.master_port = MASTER_PORT
    restarts, options.max_restarts = options.max_restarts, options.max_restarts or 0
    try:
        elastic, _, _ = config_from_args(options)
    except (ValueError, AssertionError, RuntimeError) as error:
        raise UsageError(str(error)) from error
    if alone:
        elastic.rdzv_configs.setdefault("keep_alive_interval", LONELY_KEEP_ALIVE_SECONDS)
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
    )
    return Agent(
        spec,
        controller=supervisor,
        entry=ENTRY,
        environment={
            **config.environment,
            VARIABLE: options.signals_to_handle,
        },
        preloaded=config.preload,
        elastic=elastic.max_nodes > 1,
        helpers=helpers,
        term_seconds=config.timeouts.term_seconds,
    )


def _rendezvous(elastic: LaunchConfig) -> RendezvousHandler:
    """Return the rendezvous that torch elastic's options ask for."""
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous import registry as rendezvous_registry

    return rendezvous_registry.get_rendezvous_handler(
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
