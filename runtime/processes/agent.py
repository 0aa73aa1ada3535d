"""Torch elastic's local agent with our start method, rendezvous store and reaction to failures.

Rendezvous, rank assignment, membership changes and the exit barrier are torch's. Ranks are children of a warm
forkserver, or fresh interpreters. Each attempt gets its own TCP store, served by the agent of node 0: no
address of an earlier attempt is found in it, and it outlives rank 0. After a failure an `AttemptController`
(the supervisor) decides whether to start another attempt. Runs in the main thread of `grpo-run launch`. Does
not watch ranks, judge or report.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

from grpo_run.runtime.errors import HostsLostError
from grpo_run.runtime.processes.helpers import Helpers
from grpo_run.runtime.processes.host_exchange import HostExchange
from grpo_run.runtime.processes.meeting import Meeting
from grpo_run.runtime.processes.ranks import RankGroup, RankSpec
from grpo_run.watchdog.observation import Exit

STORE_TIMEOUT = timedelta(seconds=300)
EXIT_BARRIER_SECONDS = 300
EXIT_KEY = "grpo_run/ended"
"""How many hosts of a round have come to its end."""
ASK_NODES_SECONDS = 1.0
TERM_SECONDS = 1.0
"""Between SIGTERM and SIGKILL when ranks are terminated."""
SIGNAL_POLL_SECONDS = 0.1
"""How often the main thread handles signals while another one waits for other nodes."""


class Directive(Enum):
    """What the controller directs the agent to do."""

    monitor = "monitor"
    """Continue to monitor the ranks."""
    restart = "restart"
    """Terminate the remaining ranks and start another attempt."""
    await_all = "await_all"
    """The same, when as many hosts are there as the run may have."""
    finished = "finished"
    """All local ranks have completed; wait for the other nodes, then return."""
    stopped = "stopped"
    """All ranks of all nodes agreed to stop, and the local ones have exited; wait for the other nodes, then
    return."""
    terminate = "terminate"
    """Terminate the remaining ranks and return."""


class AttemptController(Protocol):
    """Prepares each attempt and decides when and how it ends.

    The agent calls every method in the main thread.
    """

    def attempt_starting(self, workers: Sequence[Worker], group_rank: int) -> Mapping[tuple[int, int], Path]:
        """Prepare a new attempt before any rank of it is started.

        Returns the files that the ranks print to, by global rank and descriptor: 1, and 2 where that has one
        of its own.
        """

    def attempt_started(self, ranks: RankGroup) -> None:
        """All local ranks are running."""

    def poll(self, ranks: RankGroup, exits: Sequence[Exit]) -> Directive:
        """Called once per monitor interval, when it has asked to be, and immediately when ranks exit."""

    def seconds_to_poll(self) -> float:
        """How soon it asks to be polled again; infinite if the monitor interval is soon enough."""

    def membership_changed(self, how: str) -> None:
        """Nodes joined or left; all ranks are about to be restarted."""

    def admits_hosts(self) -> bool:
        """Whether all ranks may be restarted for hosts that join, because little would be repeated."""

    def host_lost(self, sentence: str, *, can_meet: bool) -> None:
        """Another host that has ranks is lost; called again as long as it is, before `poll`.

        Without the endpoint the others cannot meet again.
        """

    def hosts_met(self, exchange: HostExchange) -> None:
        """Several hosts have ranks in the attempt that starts; called before `attempt_starting`."""

    def hosts_awaited(self, text: str) -> None:
        """Other hosts are waited for, or no longer: then the text is empty."""

    def hosts_outside(self, clauses: Mapping[str, str]) -> None:
        """Which hosts do not take part, by address, and why; called again and again."""


def _call_in_thread(function: Callable[[], None], meanwhile: Callable[[], None] = lambda: None) -> None:
    """Call a function in another thread, so that signals are handled and `meanwhile` is called until it ends.

    An exception of a signal handler or of `meanwhile` ends the wait and leaves the thread behind, which ends
    with the process.

    Raises:
        BaseException: what the function raises.
    """
    failures: list[BaseException] = []

    def call() -> None:
        try:
            function()
        except BaseException as error:  # noqa: BLE001 - raised in the thread that waits
            failures.append(error)

    thread = threading.Thread(target=call, name="grpo-run-rendezvous", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(SIGNAL_POLL_SECONDS)
        meanwhile()
    if failures:
        raise failures[0]


class Agent(LocalElasticAgent):
    """The agent of one node. The `entrypoint` of its `WorkerSpec` is used in torch's messages only.

    Args:
        spec: torch elastic's specification of the workers.
        controller: decides what follows from the exits of ranks.
        entry: `module:function` that each rank runs.
        environment: what ranks inherit; torchrun's and our variables are added to it.
        variables: returns ours for a rank of the attempt that starts, from its rank and the number of ranks.
        preloaded: returns whether the ranks of the next attempt are forked from the warm interpreter.
        elastic: several nodes may join; check for membership changes.
        helpers: the processes that ranks start.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        *,
        controller: AttemptController,
        entry: str,
        environment: dict[str, str],
        variables: Callable[[int, int], Mapping[str, str]],
        preloaded: Callable[[], bool],
        elastic: bool,
        helpers: Helpers,
    ) -> None:
        specs = DefaultLogsSpecs(log_dir=os.devnull)  # without a temporary folder
        super().__init__(spec, logs_specs=specs, exit_barrier_timeout=EXIT_BARRIER_SECONDS)
        self._controller = controller
        self._entry = entry
        self._environment = environment
        self._variables = variables
        self._preloaded = preloaded
        self._elastic = elastic
        handler = spec.rdzv_handler
        self._meeting = handler if isinstance(handler, Meeting) else None
        self._helpers = helpers
        self._ranks: RankGroup | None = None
        self._attempt_store: TCPStore | None = None
        self._restarts = 0
        self._ask_nodes_at = 0.0

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        """Run torch's rendezvous, then agree on a store for this attempt only.

        Signal handlers run in the main thread only, and not while torch waits for other nodes in C++.
        """
        if self._elastic:
            try:
                _call_in_thread(functools.partial(self._meet, worker_group), self._show_wait)
            finally:
                self._controller.hosts_awaited("")
        else:
            self._rendezvous_and_store(worker_group)

    def _meet(self, worker_group: WorkerGroup) -> None:
        """Meet the other hosts, again if one of them is lost before it has told where its ranks meet."""
        while True:
            try:
                return self._rendezvous_and_store(worker_group)
            except DistError:
                if self._meeting is None:
                    raise

    def _show_wait(self) -> None:
        if self._meeting is not None:
            self._meeting.check()
            self._controller.hosts_awaited(self._meeting.wait_text())
            self._controller.hosts_outside(self._meeting.outside())

    def _rendezvous_and_store(self, worker_group: WorkerGroup) -> None:
        super()._rendezvous(worker_group)
        # torch prefixes the store with the round of the rendezvous, equal on all nodes; the static one has no
        # rounds
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
        nodes = worker_group.group_world_size
        if nodes is not None and nodes > 1:
            assert worker_group.master_addr is not None
            assert worker_group.master_port is not None
            address = worker_group.master_addr, worker_group.master_port
            self._controller.hosts_met(
                HostExchange(address, node=worker_group.group_rank, nodes=nodes, served=self._attempt_store)
            )
        files = self._controller.attempt_starting(worker_group.workers, worker_group.group_rank)
        specs = [
            RankSpec(
                rank=worker.global_rank,
                environment=self._rank_environment(worker_group, worker, files[worker.global_rank, 1]),
                log=files[worker.global_rank, 1],
                errors=files.get((worker.global_rank, 2)),
            )
            for worker in worker_group.workers
        ]
        self._ranks = RankGroup(specs, entry=self._entry, preloaded=self._preloaded())
        self._helpers.begin_attempt(self._ranks.pids.values())
        self._controller.attempt_started(self._ranks)
        return self._ranks.pids

    def _rank_environment(self, worker_group: WorkerGroup, worker: Worker, log: Path) -> dict[str, str]:
        """Return the environment that torchrun would give this rank, and our variables."""
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
                "TORCHELASTIC_ERROR_FILE": str(log.with_suffix(".torchelastic.json")),
            }
        )
        environment.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
        self._set_local_rank_env(environment, worker.local_rank, spec)  # type: ignore[arg-type]
        environment.update(self._variables(worker.global_rank, worker.world_size))
        return environment

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._shutdown()

    def _shutdown(self, death_sig: signal.Signals = signal.SIGKILL, timeout: int = 30) -> None:
        """Terminate the ranks and what they have started. Both arguments are torch's and unused."""
        try:
            if self._ranks is not None:
                self._ranks.kill(TERM_SECONDS)
        finally:
            self._helpers.terminate()
        if self._ranks is not None:
            self._ranks.release()
            self._ranks = None
        self._attempt_store = None

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        raise AssertionError("the controller polls the ranks")

    def _invoke_run(self, role: str = "default") -> RunResult:
        group = self._worker_group
        self._initialize_workers(group)
        interval = group.spec.monitor_interval
        while True:
            assert self._ranks is not None
            exits = self._ranks.wait(min(interval, self._controller.seconds_to_poll()))
            self._helpers.poll()
            if self._meeting is not None:
                self._controller.hosts_outside(self._meeting.outside())
                if any(not exit.completed for exit in exits):
                    self._meeting.look_soon()
                if self._meeting.lost:
                    self._controller.host_lost(self._meeting.lost, can_meet=self._meeting.can_meet)
            directive = self._controller.poll(self._ranks, exits)
            if directive is Directive.monitor and self._meeting is not None:
                self._meeting.check_ended()
            if directive is Directive.monitor and self._elastic and self._nodes_wait():
                how = self._meeting.change_text() if self._meeting is not None else ""
                self._controller.membership_changed(how)
                directive = Directive.restart
            if directive is Directive.monitor:
                continue
            if directive is Directive.finished:
                group.state = WorkerState.SUCCEEDED
                if not self._ranks.alive:  # else it was proved that nothing works any more
                    self._helpers.wait()
                self._await_hosts()
                return RunResult(
                    state=WorkerState.SUCCEEDED,
                    return_values={worker.global_rank: None for worker in group.workers},
                )
            if directive is Directive.stopped and self._elastic:
                self._await_hosts()
            self._stop_workers(group)
            if directive in (Directive.stopped, Directive.terminate):
                group.state = WorkerState.FAILED
                return RunResult(state=WorkerState.FAILED)
            if directive is Directive.await_all and self._meeting is not None:
                self._meeting.require_all()
            self._restarts += 1
            group.state = WorkerState.STOPPED
            self._initialize_workers(group)

    def _await_hosts(self) -> None:
        """Wait for the ends of the other hosts that can be reached."""
        with contextlib.suppress(HostsLostError):  # what this host has done stays
            _call_in_thread(self._exit_barrier, self._check_hosts)

    def _exit_barrier(self) -> None:
        """Wait until all hosts are here, by short requests: a thread that torch's barrier leaves in C++
        aborts the process when that ends.
        """
        store, deadline = self._worker_group.store, time.monotonic() + EXIT_BARRIER_SECONDS
        assert store is not None
        with contextlib.suppress(DistError):  # the host of the endpoint has seen all, and ended
            arrived = store.add(EXIT_KEY, 1)
            while arrived < self._worker_group.group_world_size and time.monotonic() < deadline:
                time.sleep(SIGNAL_POLL_SECONDS)
                arrived = store.add(EXIT_KEY, 0)

    def _check_hosts(self) -> None:
        if self._meeting is not None:
            self._meeting.check()
            if self._meeting.lost:
                raise HostsLostError(self._meeting.lost)

    def leave(self, exit_code: int | None, sentence: str, *, alone: bool) -> None:
        """Let the other hosts know how the run has ended here, if they must not wait for this one."""
        if self._meeting is not None:
            self._meeting.leave(exit_code, sentence, alone=alone)

    def _nodes_wait(self) -> bool:
        """Whether nodes wait to join. Asks the rendezvous, which may be on another machine, once per
        second.
        """
        now = time.monotonic()
        if now < self._ask_nodes_at:
            return False
        self._ask_nodes_at = now + ASK_NODES_SECONDS
        if self._worker_group.spec.rdzv_handler.num_nodes_waiting() == 0:
            return False
        return self._meeting is None or self._meeting.member_waits() or self._controller.admits_hosts()
