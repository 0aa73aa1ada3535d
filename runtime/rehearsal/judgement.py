"""What a rehearsal says: one row for each thing that was done, and whether the job can rely on it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from grpo_run.runtime.rehearsal._seen import Seen, first_difference
from grpo_run.runtime.rehearsal.drills import Drill, Outside
from grpo_run.watchdog.text import counted, size_text

FINISHED, STOPPED, KILLED = 0, 75, -9


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of the table.

    Attributes:
        held: None for what was not done.
        applies: the job has what this is about.
    """

    name: str
    done: str
    held: bool | None
    seen: str = ""
    seconds: float | None = None
    weights: str = ""
    lost: str = ""
    advice: str = ""
    applies: bool = True


def judge_job(first: Seen, second: Seen | None, steps: int) -> tuple[Row, str | None]:
    """Return the row of the undisturbed runs of so many steps, and why their weights differ; None if they are
    equal."""
    row = Row(name="undisturbed", done=f"{steps} steps of the job, twice", held=False, seconds=first.seconds)
    failed = next((one for one in (first, second) if one is not None and one.codes != (FINISHED,)), None)
    row = replace(row, seen=_end(failed or first))
    if failed is not None:
        advice = "the job does not run to its end without a fault: correct that first"
        return replace(row, advice=advice), "the undisturbed job failed"
    if not first.weights or not all(first.weights.values()):
        advice = "train with a Trainer or grpo_run.trainers.loop, with weights that a rank holds"
        row = replace(row, weights="not known: no steps of a Trainer or loop", advice=advice)
        return row, "the weights are not known"
    if second is None:
        return replace(row, held=None, weights="not compared: the time was too short"), None
    why = first_difference(first.traces, second.traces)
    if why is None:
        return replace(row, held=True, weights="equal"), None
    advice = "a recovered run repeats steps with other results; make this repeatable if that matters"
    return replace(row, weights=f"differ: {why}", advice=advice), why


def judge(drill: Drill, seen: Seen, undisturbed: Seen, unrepeatable: str | None) -> Row:
    """Judge one drill.

    Args:
        unrepeatable: why two undisturbed runs differ.
    """
    advice: list[str] = []
    fault = seen.faults[0] if seen.faults else None
    ended = [KILLED if drill.outside is Outside.kill else STOPPED]
    expected = (*ended[: drill.commands - 1], FINISHED)
    words = [text.rstrip(".") for text in (fault.sentence if fault else "", *seen.ended_calls) if text]
    if seen.resumed_at is not None:
        words.append(f"ended at step {seen.stopped_at}, went on from step {seen.resumed_at}")
    words.append(_end(seen) if not words else f"then {_end(seen)}")
    done, said = drill.done, "; ".join(words)
    row = Row(name=drill.name, done=done, held=False, seen=said, seconds=seen.seconds)
    lost, again = _lost(drill, seen)
    if seen.codes != expected:
        last = seen.faults[-1].sentence if len(seen.faults) > 2 - drill.commands else ""
        advice.append(
            f"the script fails when it is started again: {last}" if last
            else f"the run did not end as it should (--keep-files keeps its output): {seen.sentence}"
        )  # fmt: skip
        lost = "the run, until somebody corrects the script"
        return replace(row, weights="never reached the last step", lost=lost, advice=advice[0])
    if drill.causes and (fault is None or fault.cause not in drill.causes):
        advice.append("the fault was not seen for what it is")
    if drill.tool_hangs and (seen.faults or not seen.ended_calls):
        advice.append("the call was not ended by itself: ranks had to be restarted")
    if seen.left:
        advice.append(f"processes were left and have been ended: {', '.join(seen.left)}")
    if again:
        advice.append("it began again from the first step: save checkpoints more often, or keep more of them")
    weights, equal = _weights(drill, seen, undisturbed, unrepeatable)
    if not equal:
        advice.append(
            "state outside of checkpoints decides what is learned, or the script ignores the checkpoint:"
            " keep it in a callback's state, or in the state of the loop"
        )
    return replace(row, held=not advice, weights=weights, lost=lost, advice="; ".join(advice))


def _lost(drill: Drill, seen: Seen) -> tuple[str, bool]:
    """Return what was lost, and whether that is all."""
    if drill.tool_hangs and not seen.faults:
        return "nothing", False
    if drill.commands == 1:
        repeated, resumed = next(((one.lost_steps, one.from_checkpoint) for one in seen.faults), (None, None))
    else:
        resumed = seen.resumed_at
        # the last commits before a kill may not be in the journal
        repeated = max(0, (seen.stopped_at or 0) - (resumed or 0))
    if resumed is None:
        return "all steps", True
    return counted(repeated, "step") if repeated else "nothing", False


def _weights(drill: Drill, seen: Seen, undisturbed: Seen, unrepeatable: str | None) -> tuple[str, bool]:
    """Return what is said of the weights, and whether they are as they can be."""
    if seen.weights == undisturbed.weights:
        return "equal", True
    if unrepeatable is not None:
        return f"cannot be equal: {unrepeatable}", True
    if drill.may_change and seen.changed:
        return f"not compared: {seen.changed}", True
    ranks = [name for name in undisturbed.weights if seen.weights.get(name) != undisturbed.weights[name]]
    return f"differ ({ranks[0] if ranks else 'more calls than without a fault'})", False


def _end(seen: Seen) -> str:
    last = seen.codes[-1]
    return "finished" if last == FINISHED else "no end in time" if last is None else f"ended with code {last}"


def not_run(drill: Drill, why: str, *, applies: bool = True) -> Row:
    """Return the row of a drill that was not run."""
    return Row(name=drill.name, done=drill.done, held=None, seen=why, applies=applies)


def judge_room(path: str, *, free_bytes: int, checkpoint_bytes: int, saving: Mapping[str, object]) -> Row:
    """Judge whether the real output directory has room for the checkpoints that the job keeps.

    Args:
        saving: `limit`, `max_steps` and `save_steps` of the trainer.
    """
    limit, longest, every = saving.get("limit"), saving.get("max_steps"), saving.get("save_steps")
    kept = limit if isinstance(limit, int) and limit > 0 else 1
    if not limit and isinstance(longest, int) and isinstance(every, int | float) and every >= 1:
        kept = max(1, int(longest // every))
    needed = (kept + 1) * checkpoint_bytes
    said = f"{size_text(free_bytes)} free; {kept} kept and one in the making take {size_text(needed)}"
    row = Row(name="room", done="the real output directory is measured", held=True, seen=said)
    if free_bytes >= needed:
        return row
    advice = f"{path} has no room: make some, or keep fewer (save_total_limit)"
    return replace(row, held=False, lost="every checkpoint from then on", advice=advice)


def judge_untouched(changes: Sequence[str]) -> Row:
    """Judge whether the script has written into its real output directories.

    Args:
        changes: paths that are new or others than before.
    """
    seen = f"{len(changes)} files changed, first {changes[0]}" if changes else "nothing changed"
    advice = "the script, or another run, writes there by a path of its own; every start repeats it"
    row = Row(name="untouched", done="the real output directory is compared", held=not changes, seen=seen)
    return replace(row, advice=advice) if changes else row


def exit_code(rows: Sequence[Row]) -> int:
    """Return 0 if everything held that the job has, else 1."""
    return 0 if all(row.held or not row.applies for row in rows) else 1
