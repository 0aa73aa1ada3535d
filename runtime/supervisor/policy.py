"""Where a run is given up: after a fault (`decide`), and when its scripts have ended (`why_not_finished`).
Pure.

Every fault is decided here, after features were asked (`SupervisorFeature.answer`): what one decides at once
is taken, what it offers instead of a repetition counts where the run would be given up. Ends for other
reasons are no decision about a fault: a stop (`stop.py`), an agent that cannot continue, and a failure of the
supervisor itself (`outcome.py`).

The budget counts failures since the highest checkpoint of the run last rose. A run that makes progress is
never given up for the number of its faults; one without progress ends. A failure that is certain to repeat
(the same error, or the same proved wait, at the same line and step) causes one restart only, unless the next
attempt differs, because a feature answers (`points.py`). The same exception at the same line of other steps
ends a run that does little else (`runtime/history/recovery.py`).

An exception of the script before the run's first step ends it at once: there is nothing to lose. The same
exception twice while the script resumes ends it too. After progress, errors of files, the network or a hub
are tried for at least `PATIENCE_SECONDS`, with growing delays and without counting against the budget. Any
other failed start is tried once more. An error that no restart can help ends the run at once.

A host that is lost is no failure of the script: such faults have a limit of their own, after which the run
ends with 75, so that another allocation continues it.

An attempt that a feature has ended on purpose (`Alarm`) is answered by the feature; the budget and what is
left to go back to bound its answer.

Called by `faults.py` and `outcome.py`. The reason names what a restart resumes from according to the run's
history; the ranks decide it in `runtime/rank/resuming/`. Does not act.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import takewhile
from pathlib import Path

from grpo_run.runtime.history.history import History
from grpo_run.runtime.history.no_trainer_script import RESTART
from grpo_run.runtime.history.recovery import Action, Decision, Recovery, fails_to_resume, repeats, what_of
from grpo_run.runtime.launch.config import Budget
from grpo_run.watchdog.causes import Cause, Origin
from grpo_run.watchdog.observation import Phase, Slot, all_done, all_returned
from grpo_run.watchdog.text import duration_text
from grpo_run.watchdog.verdict import Verdict

PATIENCE_SECONDS = 600.0
"""How long a start is tried that fails for reasons outside the script: as long as a hub or a mount may be
away.
"""
MAX_DELAY_SECONDS = 30.0
"""Between two failed starts. The delay begins with 1 s and doubles."""
OUTSIDE_STEPS = (Phase.startup.name, Phase.idle.name)
"""Phases that belong to no step."""
MOST_LOST_HOSTS = 10
"""Without a newer checkpoint. More of them, in `PATIENCE_SECONDS` or longer, are no accident of a host."""
MIN_PATIENT_TRIES = 4
"""Tries of a start that itself takes minutes to fail."""


def decide(
    history: History,
    verdict: Verdict,
    budget: Budget,
    *,
    stopping: bool,
    can_go_back: bool = True,
    answer: Decision | None = None,
    wrong_settings: bool = False,
    at_once: bool = False,
) -> Decision:
    """Return what follows the latest incident.

    Args:
        history: contains this incident as its last recovery.
        verdict: of this incident.
        budget: limit on consecutive failures.
        stopping: a stop was requested, so nothing is restarted.
        can_go_back: something is left to resume from before the step to which the answer goes back, or
            nothing is saved at all.
        answer: what a feature offers after its own alarm, or if the failure would only repeat.
        wrong_settings: a rank has found an error that the user has to correct.
        at_once: `answer` is taken, whatever follows otherwise.
    """
    if wrong_settings:
        return _stop("the settings are wrong; a restart would repeat the error")
    if stopping:
        return _stop("a stop was requested")
    if at_once and answer is not None:
        return answer
    if verdict.cause is Cause.node_lost and (verdict.final or budget.failures_without_progress > 0):
        return _after_lost_host(history, verdict)
    if verdict.alarm is not None and answer is not None:
        return _bounded(answer, history, budget, can_go_back=can_go_back)
    if verdict.final:
        return _stop(f"{verdict.final}; a restart would repeat it")
    if fails_to_resume(history.recoveries):
        place = f", at {verdict.location.short}" if verdict.location is not None else ""
        return _stop(f"this script fails when it resumes{place}; --fresh starts a new run")
    if _is_before_first_step(history, verdict):
        return _stop(
            f"{what_of(verdict.repeat_key)} was raised before the run's first step, so a restart would"
            " repeat it"
        )
    trained = history.best_position > (0, 0)
    if trained and _deserves_patience(history, verdict) and budget.failures_without_progress > 0:
        return _try_patiently(history)
    earlier = history.recoveries[history.recoveries_at_progress : -1]
    same = [recovery for recovery in earlier if recovery.signature == verdict.signature]
    repeated = bool(same) or _is_repeated(history)
    if repeated and answer is not None and budget.failures_without_progress > 0:
        return answer
    if verdict.deterministic and repeated:
        where = "when the script started" if verdict.starting else "at the same step"
        if history.no_trainer.current or verdict.phase in OUTSIDE_STEPS:
            where = "at the same place"
        return _stop(f"the same failure occurred again {where}")
    same_bug = repeats(history.recoveries[history.recoveries_at_start :], history.steps)
    if same_bug is not None and same_bug.ends_run and history.counts_steps and verdict.counted:
        return _stop(same_bug.reason)
    if (over := _over_budget(history, budget)) is not None:
        return over
    start = start_of(history)
    if not verdict.starting:
        return Decision(action=Action.restart, reason=start)
    delay_seconds = _delay_seconds(_failed_starts(history))
    return Decision(action=Action.restart, reason=_after(start, delay_seconds), delay_seconds=delay_seconds)


def has_finished(slots: Collection[Slot | None], history: History, signature: str) -> bool:
    """Return whether a run has finished although a rank hangs.

    It has if every script has run its last line, and every rank has either done its part or hung in the same
    way in an earlier attempt, as with a thread that the script has left behind.

    Args:
        slots: of all local ranks.
        history: contains this hang as its last recovery.
        signature: of the hang.
    """
    if not all_returned(list(slots)):
        return False
    repeated = any(one.signature == signature for one in history.recoveries[:-1])
    return all_done(list(slots)) or repeated


def why_not_finished(history: History, *, unsaved: str, refused: str, left_out: str) -> str:
    """Return why a run whose scripts have run to their end is given up, as sentences; empty if it has
    finished.

    Args:
        history: of the run.
        unsaved: what is missing on disk, as the end of a sentence; empty if nothing is.
        refused: why the run has not finished for a feature, as the end of a sentence; empty if it has.
        left_out: which interrupted call the script has not repeated although the user asks for that, as a
            sentence; empty if none.
    """
    ended, at = "The script ran to its end", f" at step {history.step}"
    if unsaved:
        return f"{ended}{at}, but {unsaved}"
    if refused:
        return f"{ended}{'' if history.no_trainer.seen else at}, but {refused}"
    return f"{left_out} --require-resume is set." if left_out else ""


def _stop(reason: str) -> Decision:
    return Decision(action=Action.stop, reason=reason)


def _bounded(answer: Decision, history: History, budget: Budget, *, can_go_back: bool) -> Decision:
    """Return the answer to an alarm if the run may restart, and can go back as far."""
    if not answer.restarts:
        return answer
    if (over := _over_budget(history, budget)) is not None:
        return over
    if not can_go_back:
        return _stop(f"no checkpoint from before the onset at step {answer.before_step} is left")
    return answer


def _over_budget(history: History, budget: Budget) -> Decision | None:
    """Return the end of a run with more failures in a row than are recovered; None for any other run."""
    failures, limit = history.failures_without_progress, budget.failures_without_progress
    if failures <= limit:
        return None
    since = " without a newer checkpoint"
    if history.no_trainer.seen and history.best_position == (0, 0):
        since = ", and nothing is saved"
    plural = "" if failures == 1 else "s"
    return _stop(f"{failures} failure{plural} in a row{since} (budget {limit})")


def _after_lost_host(history: History, verdict: Verdict) -> Decision:
    """The script has not failed: its budget is not touched, and that of the hosts is larger."""
    if verdict.final:
        return _stop(verdict.final)
    since = history.recoveries[history.recoveries_at_progress :]
    lost_at = [one.at for one in since if one.cause == Cause.node_lost]
    seconds = lost_at[-1] - lost_at[0]
    if len(lost_at) > MOST_LOST_HOSTS and seconds >= PATIENCE_SECONDS:
        return _stop(
            f"hosts were lost {len(lost_at)} times in {duration_text(seconds)} without a newer checkpoint;"
            " the same commands continue on other hosts"
        )
    return Decision(action=Action.restart, reason=start_of(history), patient=True)


def _is_before_first_step(history: History, verdict: Verdict) -> bool:
    """Whether the script, which uses a Trainer or a loop, has raised before the first step that the run ever
    took.
    """
    own, call = history.no_trainer, history.calls.interrupted
    began_after = call.reached if call is not None else 0  # another run's checkpoint
    limit_expired = verdict.failed_reward is not None and not verdict.failed_reward.raised
    return (
        bool(verdict.repeat_key)
        and not limit_expired
        and not own.seen
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
    row = _in_a_row(history, _is_tried_patiently)
    tried_seconds = row[-1].at - row[0].at
    if tried_seconds >= PATIENCE_SECONDS and len(row) >= MIN_PATIENT_TRIES:
        return _stop(f"the script could not start for {duration_text(tried_seconds)}, in {len(row)} tries")
    delay_seconds = _delay_seconds(row)
    start = start_of(history)
    return Decision(
        action=Action.restart,
        reason=(
            f"{_after(start, delay_seconds)}: files, the network or a hub may come back, which is tried"
            f" for {duration_text(PATIENCE_SECONDS)}"
        ),
        delay_seconds=delay_seconds,
        patient=True,
    )


def _is_tried_patiently(recovery: Recovery) -> bool:
    """Whether it is a failure of this kind; a feature's answer may be as patient for another reason."""
    of_script = recovery.cause in (Cause.exception, Cause.startup_failure)
    return of_script and recovery.patient and recovery.action == Action.restart


def start_of(history: History) -> str:
    """Return from where the next attempt of a run continues, as a clause."""
    calls = history.calls
    trained = history.best_position > (0, 0)  # although its calls may not be known on this node
    if not len(calls) and not trained and history.no_trainer.seen:
        return RESTART
    if not len(calls):
        return "from the checkpoint that rank 0 chooses" if trained else "from the start of the script"
    call = calls.interrupted
    if call is None:
        return "from the start of the script; its finished train() calls are restored"
    which = f" of train() call {call.ordinal}" if call.ordinal > 1 else ""
    if call.saved and call.checkpoint is None:
        last = history.recoveries[-1] if history.recoveries else None
        # after host memory has run out, the snapshot is written to disk and its memory freed
        # (`HostWatch.spares_memory`); one that could not be loaded from memory is written to disk too
        from_disk = last is not None and (last.resuming or last.cause == Cause.host_oom)
        return f"from the snapshot of step {call.saved}{which} {'on disk' if from_disk else 'in memory'}"
    if call.checkpoint is not None:
        return f"from {Path(call.checkpoint).name}{which}"
    return f"from step 0{which}, because no checkpoint or snapshot of it exists yet"


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
