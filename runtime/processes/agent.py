"""Torch elastic's local agent with three things changed: how ranks start, where they meet, what a failure means.

Rendezvous, rank assignment, membership changes and the exit barrier are torch's. Ranks are children of a warm
forkserver (or fresh interpreters). Each attempt gets a TCP store of its own, served by the agent of node 0, so
that no address of an earlier attempt is found in it and the ranks' store outlives rank 0. And after a failure
it is the conductor (the supervisor) that says whether to start again. Runs in the supervisor's main thread.
Does not watch, judge or report.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

from grpo_run.runtime.processes.ranks import RankGroup, RankSpec
from grpo_run.watchdog.observation import Exit

STORE_TIMEOUT = timedelta(seconds=300)


class Next(Enum):
    """What the conductor wants of the agent."""

    go_on = "go_on"
    restart = "restart"
    finished = "finished"
    left = "left"
    """Ranks agreed to stop and have left, on every node."""
    stop = "stop"


class Conductor(Protocol):
    """Decides. Every method is called in the main thread."""

    def attempt_environment(self, worker: Worker, world_size: int, restart_count: int) -> dict[str, str]:
        """Our own variables for one rank."""

    def log_path(self, rank: int) -> Path:
        """Where one rank's output goes in the attempt now starting."""

    def attempt_starting(self, workers: Sequence[Worker], group_rank: int) -> None:
        """Called before any rank of a new attempt is started."""

    def attempt_started(self, ranks: RankGroup) -> None:
        """Called when all local ranks are running."""

    def observe(self, ranks: RankGroup, exits: Sequence[Exit]) -> Next:
        """Called about ten times a second and at once when ranks end."""

    def membership_changed(self, ranks: RankGroup) -> None:
        """Nodes joined or left; all ranks will be restarted."""


class Agent(LocalElasticAgent):
    """See the module. Construct it with a `WorkerSpec` whose `entrypoint` names the script for messages only.

    Args:
        spec: torch elastic's own.
        conductor: decides what follows from what is seen.
        entry: `module:function` run in each rank.
        environment: what the ranks inherit, before torch's and our own variables.
        preloaded: fork ranks from the warm interpreter.
        elastic: several nodes may join; look for membership changes.
        term_seconds: between SIGTERM and SIGKILL.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        *,
        conductor: Conductor,
        entry: str,
        environment: dict[str, str],
        preloaded: bool,
        elastic: bool,
        term_seconds: float = 0.0,
    ) -> None:
        super().__init__(spec, logs_specs=DefaultLogsSpecs(), exit_barrier_timeout=300)
        self._conductor = conductor
        self._entry = entry
        self._environment = environment
        self._preloaded = preloaded
        self._elastic = elastic
        self._term_seconds = term_seconds
        self._ranks: RankGroup | None = None
        self._attempt_store: TCPStore | None = None
        self._restarts = 0

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        """Torch's rendezvous, then a store for this attempt alone."""
        super()._rendezvous(worker_group)
        # torch prefixes the store with the rendezvous' round, the same on every node; the static one has no rounds
        static = worker_group.spec.rdzv_handler.get_backend() == "static"
        key = f"grpo_run/attempt/{self._restarts if static else 0}"
        store = worker_group.store
        assert store is not None
        if worker_group.group_rank == 0:
            host = worker_group.master_addr if self._elastic else "127.0.0.1"
            assert host is not None
            self._attempt_store = TCPStore(
                host, 0, is_master=True, wait_for_workers=False, timeout=STORE_TIMEOUT
            )
            store.set(key, f"{host} {self._attempt_store.port}")
        host, port = store.get(key).decode().rsplit(" ", 1)
        worker_group.master_addr, worker_group.master_port = host, int(port)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        assert worker_group.group_rank is not None
        self._conductor.attempt_starting(worker_group.workers, worker_group.group_rank)
        specs = [
            RankSpec(
                rank=worker.global_rank,
                local_rank=worker.local_rank,
                environment=self._rank_environment(worker_group, worker),
                directory=os.getcwd(),
                log=self._conductor.log_path(worker.global_rank),
            )
            for worker in worker_group.workers
        ]
        self._ranks = RankGroup(specs, entry=self._entry, preloaded=self._preloaded)
        self._conductor.attempt_started(self._ranks)
        return self._ranks.pids

    def _rank_environment(self, worker_group: WorkerGroup, worker: Worker) -> dict[str, str]:
        """What torchrun would give this rank, and our own variables beside it."""
        spec = worker_group.spec
        environment = dict(self._environment)
        environment.update(
            {
                "RANK": str(worker.global_rank),
                "GROUP_RANK": str(worker_group.group_rank),
                "ROLE_RANK": str(worker.role_rank),
                "ROLE_NAME": spec.role,
                "LOCAL_WORLD_SIZE": str(spec.local_world_size),
                "WORLD_SIZE": str(worker.world_size),
                "GROUP_WORLD_SIZE": str(worker_group.group_world_size),
                "ROLE_WORLD_SIZE": str(worker.role_world_size),
                "MASTER_ADDR": str(worker_group.master_addr),
                "MASTER_PORT": str(worker_group.master_port),
                "TORCHELASTIC_RESTART_COUNT": str(self._restarts),
                "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts),
                "TORCHELASTIC_RUN_ID": spec.rdzv_handler.get_run_id(),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "TORCHELASTIC_ERROR_FILE": str(
                    self._conductor.log_path(worker.global_rank).with_suffix(".torchelastic.json")
                ),
            }
        )
        environment.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
        self._set_local_rank_env(environment, worker.local_rank, spec)  # type: ignore[arg-type]
        environment.update(self._conductor.attempt_environment(worker, worker.world_size, self._restarts))
        return environment

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._shutdown()

    def _shutdown(self, death_sig: signal.Signals = signal.SIGKILL, timeout: int = 30) -> None:
        """End the ranks: SIGTERM for those that can tidy up, SIGKILL for the rest of their sessions."""
        if self._ranks is not None:
            self._ranks.kill(self._term_seconds)
            self._ranks.release()
            self._ranks = None
        self._attempt_store = None

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        raise AssertionError("the conductor observes")

    def _invoke_run(self, role: str = "default") -> RunResult:
        group = self._worker_group
        self._initialize_workers(group)
        interval = group.spec.monitor_interval
        while True:
            assert self._ranks is not None
            exits = self._ranks.wait(interval)
            step = self._conductor.observe(self._ranks, exits)
            if step is Next.go_on and self._elastic and group.spec.rdzv_handler.num_nodes_waiting() > 0:
                self._conductor.membership_changed(self._ranks)
                step = Next.restart
            if step is Next.go_on:
                continue
            if step is Next.finished:
                group.state = WorkerState.SUCCEEDED
                self._exit_barrier()  # type: ignore[no-untyped-call]
                return RunResult(
                    state=WorkerState.SUCCEEDED,
                    return_values={worker.global_rank: None for worker in group.workers},
                )
            if step is Next.left and self._elastic:
                self._exit_barrier()  # type: ignore[no-untyped-call]
            self._stop_workers(group)
            if step in (Next.left, Next.stop):
                group.state = WorkerState.FAILED
                return RunResult(state=WorkerState.FAILED)
            self._restarts += 1
            group.state = WorkerState.STOPPED
            self._initialize_workers(group)
