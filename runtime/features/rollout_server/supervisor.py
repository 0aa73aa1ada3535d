"""The rollout server in the supervisor: started before the ranks, watched with them, judged after a fault.

    begin_attempt   no rank runs: the server is started; or kept, and put in order; or ended and started
                    again. Waits until it has answered a token
    poll, fault     what the watch has seen is judged; a dead or stuck server ends the attempt at once
    explain         ranks that have failed or hang because of the server are not to blame
    answer          restart of the ranks within a budget of its own; a server that the run has not started
                    ends the run with exit code 75
    end             ends it

A server is never started again while ranks live: it would answer them with the weights of its model. After
each start of ranks, TRL sends all weights before the first rollout. The facts are read in `_watch.py` and by
`runtime/processes/companion.py`, and judged in `_judge.py`.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from typing import Any

from grpo_run.runtime.errors import EXIT_STOPPED, ConfigError, ProcessError
from grpo_run.runtime.features.rollout_server import _watch
from grpo_run.runtime.features.rollout_server._judge import (
    CONFIRM_SECONDS,
    FOREIGN_SECONDS,
    Finding,
    Processes,
    ended_with,
    judge,
)
from grpo_run.runtime.features.rollout_server._process import (
    ServerCommand,
    command_of,
    last_lines,
    visible_gpus,
)
from grpo_run.runtime.features.rollout_server._watch import ServerError, ServerWatch, one_token, request
from grpo_run.runtime.features.rollout_server.events import (
    RolloutServer,
    ServerEnded,
    ServerReady,
    ServerStarted,
)
from grpo_run.runtime.features.rollout_server.settings import NAME, RankServer, RolloutServerSettings
from grpo_run.runtime.history.attempt_files import AttemptFiles
from grpo_run.runtime.history.history import History
from grpo_run.runtime.history.recovery import Action, Decision
from grpo_run.runtime.history.reporter import Reporter
from grpo_run.runtime.history.run_directory import RunDirectory
from grpo_run.runtime.launch.config import RunConfig
from grpo_run.runtime.processes.companion import Companion
from grpo_run.runtime.supervisor.points import Answer, Fault, FeatureFactory, SupervisorFeature
from grpo_run.runtime.supervisor.policy import MAX_DELAY_SECONDS, start_of
from grpo_run.watchdog.causes import Cause, Origin, is_expired_limit
from grpo_run.watchdog.observation import Phase, RankState, Slot
from grpo_run.watchdog.processes import read_stat
from grpo_run.watchdog.stalls.step_clock import UNSEEN_SECONDS
from grpo_run.watchdog.text import duration_text
from grpo_run.watchdog.verdict import Verdict

LOG = "rollout-server.log"
CAUSES = frozenset(
    {Cause.rollout_server_dead, Cause.rollout_server_stuck, Cause.weight_sync_stuck, Cause.rollout_stale}
)
REPORT_SECONDS = 30.0
"""Between two lines on a server that is starting."""
ASK_SECONDS = 1.0
"""Between two questions to a server that is starting; what its exit takes to be seen is a tenth of it."""
KEPT_TOKEN_SECONDS = 20.0
"""How long a server that has outlived the ranks may take for a token; nobody else uses it."""
TREE_SECONDS = 5.0
"""Between two looks for processes that the server has started."""
WAITS = (Phase.generate, Phase.data)
"""Phases in which a rank waits for what the server makes; AsyncGRPO gets it from its data loader."""
ENGINE = "VLLM::"
"""How the titles of vLLM's engine processes begin."""
REFUSED_LINES = 60
"""Of a server whose log is not kept. vLLM's last lines are those of the process that has waited for the
engine; why the engine has failed is above them."""
PARTS = "may hold parts of two policies: weights were being sent"
"""Why a server is not kept, as the end of a sentence."""


class RunServer(SupervisorFeature):
    """The rollout server of one run."""

    name = NAME

    def __init__(self, config: RunConfig, run: RunDirectory, history: History, reporter: Reporter) -> None:
        self._config, self._history, self._reporter = config, history, reporter
        self._settings = config.of(RolloutServerSettings)
        self._log = run.path / LOG
        self._record = history.part(RolloutServer)
        self._command: ServerCommand | None = None
        self._server: Companion | None = None
        self._watch: ServerWatch | None = None
        self._engines: dict[int, str] = {}
        self._tree: dict[int, str] = {}
        """The processes of the server by pid, with their names."""
        self._tree_read_at = 0.0
        self._processes = Processes()
        self._syncing = False
        self._needed_since: float | None = None
        """A rank sends weights or waits for tokens since then."""
        self._judged_at = 0.0
        self._must_restart = ""
        """Why the server is not kept, as the end of a sentence; empty if it may be."""

    def begin_attempt(self, node: int) -> None:
        """Have a server that answers, before any rank is started."""
        if not self._settings.command or node != 0:  # rank 0 alone talks to it
            self._forget()
            if self._server is not None:
                self._end_server("rank 0 is on another node now")
            self._command = None
            return
        if self._server is not None:
            reason = self._must_restart or self._why_not_kept()
            if not reason:
                return
            self._reporter.notify(f"the rollout server {reason}: it is started again")
            self._end_server(reason)
        self._must_restart = ""
        has_begun = self._command is not None
        try:
            self._start()
        except ConfigError as error:  # the program is gone, or its port is taken
            if not has_begun:
                raise
            raise ProcessError(str(error)) from error

    def rank_settings(self, rank: int, files: AttemptFiles) -> dict[str, Any] | None:
        """Return where the server is."""
        if self._command is None:
            return None
        told = RankServer(base_url=self._command.base_url)
        return told.model_dump(mode="json")

    def poll(self) -> None:
        """Watch a server that the script has named."""
        named = self._record.base_url if not self._record.started_by_run else ""
        if named and self._server is None and self._watch is None:
            self._watch = ServerWatch(named)

    def fault(self, slots: Mapping[int, Slot | None]) -> Verdict | None:
        """Return that the server is dead or stuck."""
        watch, now = self._watch, time.monotonic()
        if watch is None:
            return None
        if now - self._judged_at > UNSEEN_SECONDS:  # the supervisor was stopped, as by Ctrl-Z
            watch.begin_anew(now)
            self._processes = Processes()
        self._judged_at = now
        phases = [one for slot in slots.values() if slot is not None for one in slot.phases]
        self._syncing = watch.syncing = any(one.phase is Phase.weight_sync for one in phases)
        inner = [slot.phases[-1] for slot in slots.values() if slot is not None and slot.phases]
        waits = [one.since_seconds for one in inner if one.phase in WAITS]
        sends = [one.since_seconds for one in phases if one.phase is Phase.weight_sync]
        watch.waiting_since = min(waits, default=None)
        self._needed_since = min([*waits, *sends], default=None)
        finding = self._judge(watch, now)
        if finding is None or not self._is_used(slots):
            return None
        step = max((slot.step for slot in slots.values() if slot is not None), default=0)
        phase = next(
            (one.phase.name for one in phases if one.phase in (Phase.weight_sync, Phase.generate)), None
        )
        return self._verdict(finding, step, phase)

    def _is_used(self, slots: Mapping[int, Slot | None]) -> bool:
        """Whether a rank may need the server: not if it trains without, or has trained. A trainer that comes
        later and does not find it fails, which `explain` explains.
        """
        states = {slot.state for slot in slots.values() if slot is not None}
        over = (RankState.between, RankState.returned, RankState.done)
        unused = RankState.training in states and not self._record.used
        return not unused and not (states and states <= set(over))

    def explain(self, verdict: Verdict) -> Verdict | None:
        """Return that the server is to blame for ranks that could not reach it, or that wait for it."""
        if self._watch is None or verdict.cause in CAUSES:
            return None
        waited = verdict.phase in {one.name for one in (*WAITS, Phase.weight_sync)} and verdict.cause in (
            Cause.generation_stall, Cause.data_stall, Cause.no_progress
        )  # fmt: skip
        if not waited and verdict.origin is not Origin.network:
            return None
        finding = self._judge_again(asks=waited or is_expired_limit([verdict.exception]))
        return None if finding is None else self._verdict(finding, verdict.step, verdict.phase)

    def answer(self, fault: Fault) -> Answer | None:
        """Restart the ranks with a server that works, within its own budget."""
        cause = fault.verdict.cause
        if fault.verdict.phase == Phase.weight_sync.name and not self._record.adapters:
            self._must_restart = PARTS
        if cause not in CAUSES or self._watch is None:
            return None
        if self._server is None:
            reason = (
                "the run has not started this server; once it works again, the same command continues"
                f" {start_of(self._history)}"
            )
            return Answer(
                decision=Decision(action=Action.stop, reason=reason), at_once=True, exit_code=EXIT_STOPPED
            )
        since = self._history.recoveries[self._history.recoveries_at_progress :]
        faults = sum(one.cause in set(map(str, CAUSES)) for one in since)
        if faults > self._settings.restarts:
            reason = (
                f"the rollout server has failed {faults} times without a newer checkpoint"
                f" (--rollout-server-restarts {self._settings.restarts}); its log is {self._log}"
            )
            return Answer(decision=Decision(action=Action.stop, reason=reason), at_once=True)
        self._must_restart = {
            Cause.rollout_server_dead: "is dead",
            Cause.rollout_stale: "has answered with other weights",
        }.get(cause, "is stuck")
        reason = f"{start_of(self._history)}, with the rollout server started again"
        # `patient`: it does not count against the budget of the ranks
        return Answer(decision=Decision(action=Action.restart, reason=reason, patient=True), at_once=True)

    def end(self) -> None:
        """End the server with the run."""
        self._forget()
        if self._server is not None:
            self._end_server("the run has ended")

    def _start(self) -> None:
        """Start the server and wait until it has answered a token; try again if it ends before.

        Raises:
            ConfigError: it has exited by itself, and this run has never had one that answered.
            ProcessError: it does not answer.
        """
        environment = {**os.environ, **self._config.environment}
        for failed in range(self._settings.restarts + 1):
            command = self._command = command_of(
                self._settings.command,
                environment,
                ranks=self._record.local_ranks,
                gpus=visible_gpus(environment),
            )
            try:
                server = Companion(command.words, {**environment, **command.environment}, self._log)
            except OSError as error:
                raise ConfigError(f"--rollout-server: {command.words[0]}: {error.strerror}") from error
            self._server = server
            started = ServerStarted(pid=server.pid, port=command.port, log=str(self._log), host=command.host)
            self._reporter.write(started)
            self._reporter.notify(
                f"starting the rollout server on port {command.port} (pid {server.pid}, log {self._log}); the"
                " ranks start once it has answered a token"
            )
            last = failed == self._settings.restarts
            if (seconds := self._await(server, command, may_fail=not last)) is not None:
                break
            time.sleep(min(MAX_DELAY_SECONDS, 2.0**failed))
        assert seconds is not None
        self._watch = ServerWatch(command.base_url)
        self._watch.note_answer(seconds)
        alive = server.processes().items()
        self._engines = {pid: one.name for pid, one in alive if one.name.startswith(ENGINE)}
        self._processes = Processes()

    def _await(self, server: Companion, command: ServerCommand, *, may_fail: bool) -> float | None:
        """Wait for the first token; return how long that took since it was asked for, and None if the server
        has ended before and is to be tried again.
        """
        began = reported_at = time.monotonic()
        why = ""
        while True:
            if server.exit_code() is not None or time.monotonic() - began >= self._settings.start_seconds:
                self._give_up_start(server.exit_code(), time.monotonic() - began, why, may_fail=may_fail)
                return None
            now = time.monotonic()
            if now - reported_at >= REPORT_SECONDS:
                reported_at = now
                last = "".join(f": {line}" for line in last_lines(self._log, 1))
                self._reporter.notify(f"the rollout server starts since {duration_text(now - began)}{last}")
            try:
                status, _ = request(command.base_url, "GET", "/health", seconds=ASK_SECONDS)
                if status == 200:
                    asked = time.monotonic()
                    left = began + self._settings.start_seconds - asked
                    one_token(command.base_url, seconds=max(ASK_SECONDS, left))
                    now = time.monotonic()
                    self._reporter.write(ServerReady(seconds=now - began))
                    self._reporter.notify(f"the rollout server answers, after {duration_text(now - began)}")
                    return now - asked
                why = f"/health answers {status}"
            except (OSError, ServerError) as error:  # not yet
                why = str(error)
            time.sleep(ASK_SECONDS / 10)

    def _give_up_start(self, code: int | None, waited_seconds: float, why: str, *, may_fail: bool) -> None:
        """End a server that has not answered: tell so if another one may be tried, else raise.

        Args:
            why: it did not when it was asked last.
        """
        never = self._record.start_seconds is None
        refused = code is not None and code >= 0 and never
        if code is None:
            what = (
                f"has not answered one token for {duration_text(waited_seconds)}"
                f" (--rollout-server-start-timeout {self._settings.start_seconds:g}; at last: {why})"
            )
        else:
            what = f"has exited {ended_with(code)} before it answered"
        self._end_server(what)
        if code is not None and may_fail and not refused:
            self._reporter.notify(f"the rollout server {what}: it is started again")
            return
        if refused:  # the launch leaves no run directory, and so no log
            said = "".join(f"\n    {line}" for line in last_lines(self._log, REFUSED_LINES))
            raise ConfigError(f"the rollout server {what}; it has said{said or ' nothing'}")
        said = "".join(f", and ends with: {line}" for line in last_lines(self._log, 1))
        raise ProcessError(f"the rollout server {what}; its log is {self._log}{said}")

    def _why_not_kept(self) -> str:
        """Return why a server that was not found dead or stuck cannot serve the next attempt, as the end of a
        sentence; empty if it can. One that is paused goes on; `_async.py` takes adapters back.
        """
        assert self._command is not None
        if self._syncing and not self._record.adapters:
            return PARTS
        url, began = self._command.base_url, time.monotonic()
        try:
            if _watch.is_paused(url):
                request(url, "POST", "/resume", seconds=_watch.ANSWER_SECONDS)
            one_token(url, seconds=KEPT_TOKEN_SECONDS)
        except (OSError, ServerError) as error:
            return f"does not answer ({error})"
        if self._watch is not None:
            self._watch.begin_anew(time.monotonic())  # it may have been paused until now
        if (finding := self._judge_again(asks=False)) is not None:
            return finding.what
        self._reporter.write(ServerReady(seconds=time.monotonic() - began, kept=True))
        return ""

    def _judge_again(self, *, asks: bool) -> Finding | None:
        """Look at the server now, for as long as a fault needs to be certain.

        Args:
            asks: ask for a token too: ranks have waited beyond their limit.
        """
        watch = self._watch
        assert watch is not None
        if asks:
            try:
                one_token(watch.base_url, seconds=KEPT_TOKEN_SECONDS)
            except (OSError, ServerError) as error:
                what = f"does not answer one token: {error}"
                return Finding(
                    cause=Cause.rollout_server_stuck, what=what, since=time.monotonic(), confidence="deadline"
                )
        until = time.monotonic() + 2 * (FOREIGN_SECONDS if self._server is None else CONFIRM_SECONDS)
        while time.monotonic() < until:
            watch.look()
            now = time.monotonic()
            finding = self._judge(watch, now)
            clear = watch.reading.refused_since is None and watch.reading.unhealthy_since is None
            if finding is not None or clear:
                return finding
            time.sleep(0.2)
        return None

    def _judge(self, watch: ServerWatch, now: float) -> Finding | None:
        """Judge what was seen last, and the server's processes now."""
        return judge(
            watch.reading, self._observe(now), syncing=self._syncing, now=now, needed_since=self._needed_since
        )

    def _observe(self, now: float) -> Processes | None:
        """Read the processes of a server that the run has started."""
        if self._server is None:
            return None
        before = self._processes
        if now - self._tree_read_at >= TREE_SECONDS:  # reads all processes of the machine
            self._tree_read_at = now
            with contextlib.suppress(OSError):  # no descriptor is left: those that are known count
                self._tree = {pid: one.name for pid, one in self._server.processes().items()}
        stats = {pid: read_stat(pid) for pid in self._tree.keys() | self._engines.keys()}
        alive = {pid: stat for pid, stat in stats.items() if stat is not None and stat.is_alive}
        stopped = next((f"{one.name} ({pid})" for pid, one in alive.items() if one.state in "Tt"), None)
        gone = next((f"{name} ({pid})" for pid, name in self._engines.items() if pid not in alive), None)
        self._processes = Processes(
            exit_code=self._server.exit_code(),
            stopped=_since(before.stopped, stopped, now),
            gone=_since(before.gone, gone, now),
        )
        return self._processes

    def _verdict(self, finding: Finding, step: int, phase: str | None) -> Verdict:
        url = self._watch.base_url if self._watch is not None else ""
        whose = "" if self._server is not None else ", which this run has not started,"
        log = f"Read {self._log}." if self._server is not None else "Ask who runs it."
        return Verdict(
            cause=finding.cause,
            step=step,
            phase=phase,
            confidence=finding.confidence,
            since_seconds=time.monotonic() - finding.since,
            sentence=f"The rollout server at {url}{whose} {finding.what}.",
            signature=str(finding.cause),
            advice=(log,),
        )

    def _end_server(self, because: str) -> None:
        assert self._server is not None
        self._forget()
        remains = [one for one in self._server.end() if one.remains]
        if remains:
            self._reporter.warn(None, f"could not end {', '.join(map(str, remains))} of the rollout server")
        self._reporter.write(ServerEnded(because=because))
        self._server, self._engines, self._tree = None, {}, {}

    def _forget(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None


def _since(before: tuple[str, float] | None, now_so: str | None, now: float) -> tuple[str, float] | None:
    """Return what is so and since when; None if nothing is."""
    if now_so is None:
        return None
    return (now_so, before[1] if before is not None and before[0] == now_so else now)


PART: FeatureFactory = RunServer
