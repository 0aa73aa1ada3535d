"""How a fault is handled: gather, diagnose, decide, in this order and in one function.

    fault → `gather`: evidence, and an incident folder → `diagnose`: verdict → `decide`: restart, or give up

`FaultHandler.handle` is called by the supervisor when ranks failed or hang. The agent kills the remaining
ranks only after it has returned. `gather` (`incident.py`) reads everything once; `diagnose`
(`watchdog/diagnosis/fault.py`) and `decide` (`policy.py`) are pure. The `incident` event is made from the
verdict and from the ranks' error files, also those of ranks that have not exited yet. Does not end the run
(`supervisor.py`).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from grpo_run.runtime.errors import (
    EXIT_FINISHED,
    EXIT_GAVE_UP,
    EXIT_STOPPED,
    EXIT_USAGE,
    HostsMissingError,
    UsageError,
)
from grpo_run.runtime.history.events import ActionChosen, AttemptEnded, IncidentConfirmed, WarningGiven
from grpo_run.runtime.history.history import History
from grpo_run.runtime.history.lifecycle import Lifecycle, RunEvent
from grpo_run.runtime.history.recovery import Action, Decision
from grpo_run.runtime.history.reporter import Reporter
from grpo_run.runtime.history.run_directory import RunDirectory
from grpo_run.runtime.launch.config import RunConfig
from grpo_run.runtime.supervisor.incident import IncidentContext, OpenIncident, gather, tell_ranks
from grpo_run.runtime.supervisor.points import Answer, Fault, SupervisorFeature
from grpo_run.runtime.supervisor.policy import decide, has_finished
from grpo_run.runtime.supervisor.setting_aside import can_go_back
from grpo_run.runtime.supervisor.stop_means import stop_code
from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.diagnosis.fault import Evidence, diagnose
from grpo_run.watchdog.json_values import to_json
from grpo_run.watchdog.observation import Exit, RankError, Slot, all_returned
from grpo_run.watchdog.verdict import Verdict

_USAGE: list[type[UsageError]] = [UsageError, *UsageError.__subclasses__()]
USAGE_ERRORS = frozenset(error.__name__ for error in _USAGE)
"""Errors of a rank that the user has to correct. A script's own `sys.exit(2)` is not one of them."""


@dataclass(frozen=True, kw_only=True)
class Resolution:
    """What follows a fault: a new attempt after a delay, or the end of the run with `event`, `exit_code` and
    a sentence.

    An empty sentence means that the final state of the run is summarized as usual.
    """

    restart: bool = False
    delay_seconds: float = 0.0
    needs_all_hosts: bool = False
    leaves: bool = False
    event: RunEvent = RunEvent.gave_up
    exit_code: int = EXIT_GAVE_UP
    sentence: str = ""


class FaultHandler:
    """Handles the faults of one run.

    Args:
        config: of the run; the restart budget, and the ranks whose output the terminal shows.
        run: the run directory.
        reporter: for events and messages.
        history: contains each event as soon as it is written.
        features: are asked for an answer, in this order.
    """

    def __init__(
        self,
        config: RunConfig,
        run: RunDirectory,
        *,
        lifecycle: Lifecycle,
        reporter: Reporter,
        history: History,
        features: Sequence[SupervisorFeature] = (),
    ) -> None:
        self._config = config
        self._run = run
        self._lifecycle = lifecycle
        self._reporter = reporter
        self._history = history
        self._features = features

    def begin_attempt(self, node: int) -> None:
        """Let features prepare what depends on the last fault."""
        for feature in self._features:
            feature.begin_attempt(node)

    def handle(
        self,
        context: IncidentContext,
        slots: Mapping[int, Slot | None],
        *,
        stopping: bool,
        exits_unseen_since: float,
    ) -> Resolution:
        """Handle failed exits, or the hang in `context.finding`.

        Args:
            context: the fault.
            slots: the reading of the board in which it was observed.
            stopping: a stop has been requested.
            exits_unseen_since: when ranks were started, or polled last without a failure, in monotonic
                seconds.
        """
        left = context.finding is not None and all_returned(list(slots.values()))
        if not left:
            self._lifecycle.fire(RunEvent.fault)
        began_at = self._wall_time_of_fault(context, exits_unseen_since)
        incident = gather(self._run, context)
        if not left:  # else nothing of the run is lost, here or elsewhere
            incident = context.join(incident)
        verdict = self._explained(diagnose(incident.evidence))
        self._write_incident(incident, verdict, slots, began_at)
        if left:
            if has_finished(slots.values(), self._history, verdict.signature):
                return self._end_exit_hang(context, verdict)
            self._lifecycle.fire(RunEvent.fault)
        self._lifecycle.fire(RunEvent.evidence_written)
        usage = _usage_error(incident.evidence.failed)
        answer = self._answer(context, incident.evidence, verdict)
        needs_hosts = usage is not None and usage.type == HostsMissingError.__name__ and not stopping
        if needs_hosts:
            reason = "when all hosts are there"
            answer = Answer(
                decision=Decision(action=Action.restart, reason=reason, patient=True), at_once=True
            )
            usage = None
        decision = decide(
            self._history,
            verdict,
            self._config.budget,
            stopping=stopping,
            can_go_back=self._can_go_back(answer),
            answer=answer.decision if answer is not None else None,
            at_once=answer is not None and answer.at_once,
            wrong_settings=usage is not None,
        )
        if answer is not None and decision is not answer.decision:
            answer = None  # not taken
        if usage is None and not needs_hosts:
            self._show_traceback(verdict, restart=decision.restarts, stopping=stopping)
        self._act(verdict, decision, answer)
        tell_ranks(context, verdict)
        resolution = self._resolve(verdict, decision, answer, usage=usage, stopping=stopping)
        return replace(resolution, needs_all_hosts=needs_hosts)

    def _explained(self, verdict: Verdict) -> Verdict:
        """Return the verdict on what has caused a fault of the ranks; their own sentence follows its."""
        found = (feature.explain(verdict) for feature in self._features)
        cause = next((one for one in found if one is not None), None)
        if cause is None:
            return verdict
        return replace(cause, sentence=f"{as_sentence(cause.sentence)} {verdict.sentence}")

    def _wall_time_of_fault(self, context: IncidentContext, exits_unseen_since: float) -> float:
        """Return when the fault began, in seconds since the epoch, as far as clocks show it."""
        finding = context.finding
        began_at = exits_unseen_since if finding is None else finding.began_at_seconds
        return time.time() - (time.monotonic() - began_at)

    def _answer(self, context: IncidentContext, evidence: Evidence, verdict: Verdict) -> Answer | None:
        """Return what the first feature offers that has an answer; None if none has."""
        _, also_failed = evidence.other_failures(verdict)
        fault = Fault(
            verdict=verdict,
            failed_ranks=(*verdict.culprits, *also_failed),
            files=context.attempt.files,
            on_several_nodes=context.attempt.on_several_nodes,
            local_ranks=context.attempt.local_rank_of.keys(),
        )
        answers = [feature.answer(fault) for feature in self._features]
        return next((one for one in answers if one is not None), None)

    def _act(self, verdict: Verdict, decision: Decision, answer: Answer | None) -> None:
        """Write a decision to the journal, and what it changes for the next attempt."""
        self._reporter.write(
            ActionChosen(
                action=str(decision.action),
                reason=decision.reason,
                patient=decision.patient,
                delay_seconds=decision.delay_seconds,
                before_step=decision.before_step,
                fresh_from=decision.fresh_from,
            )
        )
        self._reporter.write(AttemptEnded(cause=str(verdict.cause), action=str(decision.action)))
        if answer is not None:
            answer.act()

    def _resolve(
        self,
        verdict: Verdict,
        decision: Decision,
        answer: Answer | None,
        *,
        usage: RankError | None,
        stopping: bool,
    ) -> Resolution:
        if usage is not None and not stopping:
            # found only inside a rank; reported as the launcher would have reported it
            return Resolution(exit_code=EXIT_USAGE, sentence=usage.message)
        if decision.restarts:
            return Resolution(restart=True, delay_seconds=decision.delay_seconds)
        if stopping:
            return Resolution(event=RunEvent.stopped, exit_code=stop_code(self._history))
        at_end = EXIT_STOPPED if verdict.cause is Cause.node_lost else EXIT_GAVE_UP
        code = at_end if answer is None else answer.exit_code
        event = RunEvent.stopped if code == EXIT_STOPPED else RunEvent.gave_up
        said, place = verdict.sentence, verdict.location
        if place is not None and place.short.partition(" ")[0] not in said + decision.reason:
            said = f"{said.rstrip('. ')} ({place.short})"
        word = "Stopped" if code == EXIT_STOPPED else "Gave up"
        sentence = f"{as_sentence(said)} {word}: {as_sentence(decision.reason)}"
        advice = verdict.advice if verdict.shortage is not None else ()
        leaves = answer is not None and answer.leaves
        return Resolution(event=event, exit_code=code, sentence=" ".join((sentence, *advice)), leaves=leaves)

    def _can_go_back(self, answer: Answer | None) -> bool:
        before = answer.decision.before_step if answer is not None else None
        call = self._history.recoveries[-1].train_call
        return before is None or can_go_back(self._history, self._config, call, before)

    def report_slow_stop(self, context: IncidentContext) -> None:
        """Collect evidence of ranks that did not stop in time. They are terminated next."""
        incident = gather(self._run, context)
        verdict = diagnose(incident.evidence)
        self._reporter.notify(
            f"{verdict.sentence} They are terminated; evidence is in {incident.close(verdict)}"
        )

    def _show_traceback(self, verdict: Verdict, *, restart: bool, stopping: bool) -> None:
        """Show the culprit's traceback before the fault, unless the fault's own lines suffice, or its rank is
        shown: then it is there already.
        """
        shown = self._config.shown_ranks
        wanted = bool(shown) if restart else not stopping
        if verdict.traceback and verdict.culprit is not None and verdict.culprit not in shown and wanted:
            self._reporter.notify(verdict.traceback.rstrip())

    def _end_exit_hang(self, context: IncidentContext, verdict: Verdict) -> Resolution:
        """A rank does not exit although every script has run its last line: warn, and end the run."""
        reason = "every script has run its last line"
        self._reporter.write(ActionChosen(action=str(Action.stop), reason=reason))
        self._reporter.write(WarningGiven(text=verdict.sentence))
        if self._history.ranks_stopped or context.attempt.exits.stopped:
            return Resolution(event=RunEvent.stopped, exit_code=EXIT_STOPPED)
        return Resolution(event=RunEvent.completed, exit_code=EXIT_FINISHED)

    def _write_incident(
        self, incident: OpenIncident, verdict: Verdict, slots: Mapping[int, Slot | None], began_at: float
    ) -> None:
        """Write the verdict to the incident's folder and to the journal."""
        folder = incident.close(verdict)
        error = next((one.error for one in incident.evidence.failed if one.rank == verdict.culprit), None)
        hung = incident.evidence.deadlock is not None or incident.evidence.stall is not None
        failed_at = began_at if hung or error is None else error.wall_time
        failed_at = min(failed_at, time.time() - verdict.since_seconds)
        lost_connection, also_failed = incident.evidence.other_failures(verdict)
        train_calls = [slot.train_call for slot in slots.values() if slot is not None]
        self._reporter.write(
            IncidentConfirmed(
                rank=verdict.culprit,
                step=verdict.step,
                train_call=max(train_calls, default=0),
                cause=str(verdict.cause),
                culprit=verdict.culprit,
                phase=verdict.phase,
                lost_connection=lost_connection,
                also_failed=also_failed,
                sentence=verdict.sentence,
                signature=verdict.signature,
                repeat_key=verdict.repeat_key,
                starting=verdict.starting,
                origin=str(verdict.origin),
                failed_reward=to_json(verdict.failed_reward) if verdict.failed_reward is not None else None,
                incident=str(folder),
                failed_at=failed_at,
                guard=dict(verdict.alarm.details) if verdict.alarm is not None else None,
                shortage=verdict.shortage.as_json() if verdict.shortage is not None else None,
                detection_seconds=max(0.0, time.time() - failed_at),
            )
        )


def _usage_error(failed: Iterable[Exit]) -> RankError | None:
    return next((exit.error for exit in failed if exit.error and exit.error.type in USAGE_ERRORS), None)


def as_sentence(text: str) -> str:
    """Return the text with a full stop at its end, unless it ends with punctuation."""
    text = text.rstrip()
    return text if text.endswith((".", "!", "?", "…")) else f"{text}."
