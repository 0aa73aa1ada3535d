"""The `incident` event of the journal: what is recorded of one fault, from its verdict and from what the ranks did.

Called by `faults.py` once evidence is on disk. Reads the error files of ranks that have not exited yet. Does not judge
(`watchdog.diagnosis`) and writes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grpo_run.runtime.continuity.memory_plan import MemoryPlan
from grpo_run.runtime.supervision.attempts.attempt import Attempt
from grpo_run.runtime.supervision.attempts.exits import Exits
from grpo_run.runtime.supervision.incident import IncidentContext, IncidentOutcome
from grpo_run.runtime.supervision.memory.run_memory import signature_with_plan
from grpo_run.watchdog.diagnosis.lost_peers import is_lost_peer
from grpo_run.watchdog.observation import RankError, Slot
from grpo_run.watchdog.verdict import Verdict


def incident_fields(
    outcome: IncidentOutcome,
    context: IncidentContext,
    slots: Mapping[int, Slot | None],
    *,
    plan: MemoryPlan,
    began_at: float,
) -> dict[str, Any]:
    """Return the fields of the event, but for `detection_seconds`.

    Args:
        outcome: of the investigation.
        context: the fault.
        slots: the reading of the board in which it was observed.
        plan: the memory plan of the attempt.
        began_at: when a hang began, or when ranks were last seen without a failure; seconds since the epoch.
    """
    verdict = outcome.verdict
    error = _error_of_culprit(context.attempt.exits, verdict)
    return {
        "rank": verdict.culprit,
        "step": verdict.step,
        "train_call": max((slot.train_call for slot in slots.values() if slot is not None), default=0),
        "cause": str(verdict.cause),
        "culprit": verdict.culprit,
        "phase": verdict.phase,
        **other_failures(context.attempt, verdict),
        "sentence": verdict.sentence,
        "signature": signature_with_plan(verdict, plan),
        "repeat_key": verdict.repeat_key,
        "starting": verdict.starting,
        "memory_plan": plan.text,
        "origin": str(verdict.origin),
        "failed_reward": verdict.failed_reward.as_json() if verdict.failed_reward is not None else None,
        "incident": str(outcome.folder),
        "failed_at": error.wall_time if context.finding is None and error is not None else began_at,
        "guard": verdict.trip.as_json() if verdict.trip is not None else None,
        "shortage": verdict.shortage.as_json() if verdict.shortage is not None else None,
    }


def other_failures(attempt: Attempt, verdict: Verdict) -> dict[str, list[int]]:
    """The ranks that failed besides the culprit: because they lost their connection to it, or by themselves.

    A rank that has written its error is listed although its process may not have exited yet.
    """
    failed = {exit.rank: exit.error for exit in attempt.exits.failed}
    for rank in attempt.place_of_rank.keys() - {exit.rank for exit in attempt.exits.seen}:
        error = attempt.files.read_error(rank)
        if error is not None:
            failed[rank] = error
    if verdict.culprit is not None:
        failed.pop(verdict.culprit, None)
    lost = sorted(rank for rank, error in failed.items() if error is not None and is_lost_peer(error))
    return {"lost_connection": lost, "also_failed": sorted(failed.keys() - set(lost))}


def _error_of_culprit(exits: Exits, verdict: Verdict) -> RankError | None:
    return next((exit.error for exit in exits.failed if exit.rank == verdict.culprit), None)
