"""The state of a run in one sentence, and where the model of a finished run is.

Called by the status, by the end of a run and by commands. Pure but for a look whether directories exist.
"""

from __future__ import annotations

import os
from pathlib import Path

from grpo_run.runtime.call_names import LOOP
from grpo_run.runtime.errors import EXIT_FINISHED, EXIT_GAVE_UP, EXIT_STOPPED
from grpo_run.runtime.history import no_trainer_script
from grpo_run.runtime.history.history import History
from grpo_run.runtime.history.recovery import most_repeated
from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.text import counted


def summarize(state: str, history: History, exit_code: int | None = None) -> str:
    """Return one sentence on the state of the run.

    Args:
        state: of the lifecycle, or `unknown`.
        exit_code: of a run that is about to end; that of the history if None.
    """
    if exit_code is None:
        exit_code = history.exit_code
    left_after = history.calls.left_after(history.train_call) if exit_code == EXIT_FINISHED else None
    step = history.step if left_after is None else left_after  # no vote follows the last step then
    place = f"step {step} of {history.target_steps}" if history.target_steps else f"step {step}"
    if left_after is not None:
        place += ", where the script left the loop"
    recovered = sum(
        1
        for recovery in history.recoveries
        # the script of a finished run may have had no further step to commit
        if recovery.recovery_seconds is not None
        or (exit_code == EXIT_FINISHED and recovery.action.startswith("restart"))
        or (exit_code == EXIT_FINISHED and recovery.cause == Cause.node_lost)  # started again by somebody
    )
    faults = {0: "no faults", 1: "1 fault recovered"}.get(recovered, f"{recovered} faults recovered")
    if history.recoveries and not recovered:
        faults = "no fault recovered"
    if history.times_lost:
        lost = f"this host lost {counted(history.times_lost, 'time')}"
        faults = f"{faults}, {lost}" if history.recoveries else lost
    if repeated := most_repeated(history.recoveries):
        faults = f"{faults}, {repeated}"
    trained = history.counts_steps
    if history.no_trainer.seen and not trained and (exit_code is None or state in ("finished", "stopped")):
        restarts = sum(recovery.action.startswith("restart") for recovery in history.recoveries)
        return no_trainer_script.summarize(state, exit_code, restarts=restarts)
    if state == "stopped" and exit_code == EXIT_GAVE_UP and not trained:
        return "Stopped. The same command runs the script from the beginning; nothing is saved."
    if state == "stopped" and exit_code not in (None, EXIT_STOPPED):
        return f"Stopped: the script returned {exit_code}. Run the same command to start again."
    if exit_code == EXIT_FINISHED and not trained:
        return f"Finished, {faults}. The script did not use a Trainer, so no steps were counted."
    if exit_code == EXIT_FINISHED:
        ended = history.sentence if history.finished else ""
        return ended or f"Finished at {place}, {faults}."
    if exit_code == EXIT_STOPPED and not trained:
        return "Stopped before the first step of a Trainer. Run the same command to start again."
    if exit_code == EXIT_STOPPED:
        saved = f"checkpoint at step {history.checkpoint.step}" if history.checkpoint else "no checkpoint yet"
        if history.node:
            saved = "the host of rank 0 names the checkpoint"
        return f"Stopped at {place} ({saved}). Run the same command to resume."
    if exit_code is not None:
        return history.sentence or f"Gave up at {place}."
    if state == "unknown":
        return (
            f"Unknown: the supervisor exited without ending the run, last seen at {place}."
            " Run the same command to resume."
        )
    if state == "starting" and history.restarting:
        return f"Restarting after {place}, attempt {history.attempts}, {faults}."
    summary = f"{state.capitalize()} at {place}, attempt {history.attempts}, {faults}."
    return f"{summary} {no_trainer_script.SINCE_CALL}" if history.no_trainer.current else summary


def model_place(history: History) -> str:
    """Return where the model of a finished run is, as a sentence; empty if that is not known.

    What the script has saved by `save_model` comes before the newest checkpoint or snapshot.
    """
    if path := _saved_model(history):
        return f"The model is in {path}."
    checkpoint = history.checkpoint
    if (
        checkpoint is None
        or checkpoint.train_call != history.train_call
        or not os.path.isdir(checkpoint.path)
    ):
        return ""
    return f"Last {Path(checkpoint.path).name.partition('-')[0]}: {checkpoint.path}."


def _saved_model(history: History) -> str:
    """Return where the script has saved the model of its last call with `save_model`; empty if it is not
    there.
    """
    call, path = history.saved_model or (0, "")
    return path if call == history.train_call and os.path.isdir(path) else ""


def lacks_model_of_script(history: History) -> bool:
    """Return whether a script that uses a Trainer has no model of its own on disk, as far as that can be
    seen.

    A hand-written loop and a script without a Trainer save by themselves, which is not seen.
    """
    call = next((call for call in history.calls if call.ordinal == history.train_call), None)
    if call is None or call.trainer_class == LOOP or _saved_model(history):
        return False
    lineage = history.calls.lineage
    return not history.scheduled_call or lineage(history.scheduled_call) != lineage(call.ordinal)
