"""The decision after a failure: restart, or give up. Pure: (history, verdict, budget) to a decision.

The budget counts failures since the highest checkpoint of the run last rose. A run that makes progress is
therefore never given up for the number of its faults, and a run without progress ends. A failure that is
certain to repeat (the same error, or the same proved wait, at the same line and step) causes only one restart, unless the next attempt differs: a
reward function that has failed twice at one step runs in a worker then, and prompts on which generation or rewards have
failed twice are replaced. The same exception at the same line of other steps ends a run that does little else
(`history_parts/repeats.py`).

An exception of the script before the run's first step ends it at once: there is nothing to lose. The same exception
twice while the script resumes ends it too. Another failed start is judged by what the run has to lose. Before any
step of the run it is tried once more. After progress, errors of files, the network or a hub are tried for at least
`PATIENCE_SECONDS`, with growing delays and without counting against the budget; other errors twice. An error that no
restart can help ends the run at once. What follows a learning guard is decided in `rollback/policy.py`. Called by
`faults.py`. Does not act.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile

from grpo_run.runtime.continuity.decision import Action, Decision
from grpo_run.runtime.continuity.expected import expected_start
from grpo_run.runtime.continuity.recovery import Recovery, fails_to_resume
from grpo_run.runtime.launch.config import Budget
from grpo_run.runtime.record.history import History
from grpo_run.runtime.record.history_parts.repeats import repeats, what_of
from grpo_run.runtime.supervision.rollback.policy import decide_trip
from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.duration_text import duration_text
from grpo_run.watchdog.observation import Phase
from grpo_run.watchdog.origins import Origin
from grpo_run.watchdog.verdict import Verdict

PATIENCE_SECONDS = 600.0
"""How long a start is tried that fails for reasons outside the script: as long as a hub or a mount may be away."""
MAX_DELAY_SECONDS = 30.0
"""Between two failed starts. The delay begins with 1 s and doubles."""
FAILED_PHASES = {Phase.generate.name: "generation has", Phase.reward.name: "rewards have"}
"""Phases that depend on the prompts, as subjects of a sentence."""
OUTSIDE_STEPS = (Phase.startup.name, Phase.idle.name)
"""Phases that belong to no step."""
MIN_PATIENT_TRIES = 4
"""Tries of a start that itself takes minutes to fail."""


def decide(
    history: History,
    verdict: Verdict,
    budget: Budget,
    *,
    stopping: bool,
    can_go_back: bool = True,
    prompts: int = 0,
    starts_over: bool = False,
) -> Decision:
    """Return what follows the latest incident.

    Args:
        history: contains this incident as its last recovery.
        verdict: of this incident.
        budget: limit on consecutive failures.
        stopping: a stop was requested, so nothing is restarted.
        can_go_back: for a learning guard, see `decide_trip`.
        prompts: how many prompts could be put into quarantine.
        starts_over: a new run follows if this one cannot be resumed.
    """
    if stopping:
        return _stop("a stop was requested")
    if verdict.trip is not None:
        return decide_trip(history, verdict.trip, budget, can_go_back=can_go_back)
    if verdict.final:
        return _stop(f"{verdict.final}; a restart would repeat it")
    if fails_to_resume(history.recoveries):
        place = f", at {verdict.location.short}" if verdict.location is not None else ""
        then = (
            "a new run starts over"
            if starts_over
            else "--on-resume-failure fresh starts over into a new directory"
        )
        return _stop(f"this script fails when it resumes{place}; {then}")
    if _is_before_first_step(history, verdict):
        return _stop(
            f"{what_of(verdict.repeat_key)} was raised before the run's first step, so a restart would repeat it"
        )
    trained = history.best_position > (0, 0)
    if (
        history.rewards.due is not None
        and 0 < history.failures_without_progress <= budget.failures_without_progress
    ):
        return Decision(action=Action.restart, reason=start_of(history))
    if (
        (trained or history.own.checkpoint is not None)
        and _deserves_patience(history, verdict)
        and budget.failures_without_progress > 0
    ):
        return _try_patiently(history)
    earlier = history.recoveries[history.recoveries_at_progress : -1]
    same = [recovery for recovery in earlier if recovery.signature == verdict.signature]
    failed_start = trained and verdict.starting
    repeated = len(same) > 1 if failed_start else bool(same) or _is_repeated(history)
    stalls = (Cause.generation_stall, Cause.reward_stall)
    # ranks that disagree on a collective do so again with other prompts
    raised = verdict.deterministic and verdict.cause is Cause.exception
    fails_on_its_prompts = verdict.phase in FAILED_PHASES and (raised or verdict.cause in stalls)
    if repeated and prompts and fails_on_its_prompts and budget.failures_without_progress > 0:
        return Decision(
            action=Action.quarantine_batch,
            reason=f"{start_of(history)}; {FAILED_PHASES[verdict.phase or '']} failed twice on this rollout",
        )
    if verdict.deterministic and repeated:
        where = "when the script started" if verdict.starting else "at the same step"
        if history.own.current or verdict.phase in OUTSIDE_STEPS:
            where = "at the same place"
        return _stop(f"the same failure occurred again {where}")
    same_bug = repeats(history.recoveries[history.recoveries_at_start :], history.steps)
    if same_bug is not None and same_bug.ends_run and history.counts_steps and verdict.counted:
        return _stop(same_bug.reason)
    failures = history.failures_without_progress
    if failures > budget.failures_without_progress:
        plural = "" if failures == 1 else "s"
        since = " without a newer checkpoint"
        if history.own.seen and not trained:
            since = f"{since} of the script's own" if history.own.checkpoint else ", and nothing is saved"
        limit = budget.failures_without_progress
        return _stop(f"{failures} failure{plural} in a row{since} (budget {limit})")
    start = start_of(history)
    if not verdict.starting:
        return Decision(action=Action.restart, reason=start)
    delay_seconds = _delay_seconds(_failed_starts(history))
    return Decision(
        action=Action.restart,
        reason=_after(start, delay_seconds),
        delay_seconds=delay_seconds,
    )


def _stop(reason: str) -> Decision:
    return Decision(action=Action.stop, reason=reason)


def _is_before_first_step(history: History, verdict: Verdict) -> bool:
    """Whether the script, which uses a Trainer or a loop, has raised before the first step that the run ever took."""
    own, call = history.own, history.calls.interrupted
    began_after = call.reached if call is not None else 0  # another run's checkpoint
    return (
        bool(verdict.repeat_key)
        and not (own.seen or own.without_trainer)
        and not history.recoveries[-1].resuming
        and max(history.best_position, history.highest_checkpoint) == (0, 0)
        and verdict.step <= began_after
    )


def _deserves_patience(history: History, verdict: Verdict) -> bool:
    """Whether the failure comes from outside the script, at its start or before the attempt's first step."""
    if verdict.starting:
        return verdict.origin in (Origin.files, Origin.network)
    return verdict.origin is Origin.network and not history.committed_in_attempt


def _try_patiently(history: History) -> Decision:
    row = _in_a_row(history, lambda recovery: recovery.patient)
    tried_seconds = row[-1].at - row[0].at
    if tried_seconds >= PATIENCE_SECONDS and len(row) >= MIN_PATIENT_TRIES:
        return _stop(f"the script could not start for {duration_text(tried_seconds)}, in {len(row)} tries")
    delay_seconds = _delay_seconds(row)
    start = start_of(history)
    return Decision(
        action=Action.restart,
        reason=f"{_after(start, delay_seconds)}: files, the network or a hub may come back, which is tried"
        f" for {duration_text(PATIENCE_SECONDS)}",
        delay_seconds=delay_seconds,
        patient=True,
    )


def start_of(history: History) -> str:
    """Return from where the next attempt of a run continues, as a clause."""
    trained = history.best_position > (0, 0)
    resuming = bool(history.recoveries) and history.recoveries[-1].resuming
    now = history.time.last or 0.0
    return expected_start(history.calls, history.own, trained=trained, now=now, in_memory=not resuming)


def _after(start: str, delay_seconds: float) -> str:
    """Return from where the next attempt continues, and when."""
    first, separator, rest = start.partition(";")
    return f"{first}, in {duration_text(delay_seconds)}{separator}{rest}"


def _failed_starts(history: History) -> list[Recovery]:
    return _in_a_row(history, lambda recovery: recovery.starting)


def _in_a_row(history: History, belongs: Callable[[Recovery], bool]) -> list[Recovery]:
    """Return the latest incident and those directly before it that belong to it, oldest first."""
    *before, now = history.recoveries
    return [*reversed(list(takewhile(belongs, reversed(before)))), now]


def _delay_seconds(row: list[Recovery]) -> float:
    return float(min(MAX_DELAY_SECONDS, 2.0 ** min(len(row) - 1, 16)))


def _is_repeated(history: History) -> bool:
    """Return whether the last two failures are the same one, even if a snapshot was taken between them."""
    if len(history.recoveries) < 2:
        return False
    before, now = history.recoveries[-2:]
    return (before.signature, before.train_call, before.step) == (now.signature, now.train_call, now.step)
