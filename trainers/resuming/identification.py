"""Match a `train()` call with those that the run has started before. Runs on rank 0, for all ranks.

A script need not repeat its calls in the same order: it may skip a stage whose result exists. A call is
therefore recognized by its trainer's class and its output directory, and keeps its number in the run:

1. a call of the same class in the same directory;
2. the call that wrote the checkpoints of this run in the directory, if that was moved or mounted elsewhere;
3. a call of the same class with equal settings, whose directory has another name only because each start of the
   script makes another one (`moved_directory.py`);
4. else it is a new call, with the next free number.

Each known call is recognized once. Also judges whether a call that starts from step 0 should not. Pure, except
for the manifests that it reads. Called by `hooks/resume.py`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from grpo_run.runtime.call_names import call_title
from grpo_run.runtime.checkpoints.manifest import TrainCall
from grpo_run.runtime.checkpoints.search import directories_of_run, find_checkpoints
from grpo_run.runtime.continuity.train_calls import CallDirectory, KnownCall
from grpo_run.trainers.resuming.moved_directory import is_same_directory


@dataclass(frozen=True, kw_only=True)
class IdentifiedCall:
    """A call with its number in the run.

    Attributes:
        call: with this number.
        known: what the run knows of it; None for a call that was not begun before.
        moved_from: the directory in which its checkpoints are, if the script has given it another one now.
        lost: the call that this one seems to repeat from step 0, in another directory.
        repeats: it certainly does, because a later or the same call was interrupted.
        skipped: the interrupted call that the script has left out.
    """

    call: TrainCall
    known: KnownCall | None = None
    moved_from: str | None = None
    lost: KnownCall | None = None
    repeats: bool = False
    skipped: KnownCall | None = None

    @property
    def directories(self) -> tuple[Path, ...]:
        """The directories that the call has used before, newest first."""
        return () if self.known is None else tuple(Path(one.path) for one in self.known.directories)


def identify(
    call: TrainCall,
    known_calls: Sequence[KnownCall],
    claimed: Iterable[int],
    *,
    settings: str,
    directory: CallDirectory,
    run_id: str,
) -> IdentifiedCall:
    """Return the call with its number in the run.

    Args:
        call: numbered by its position in the script.
        known_calls: of this run, from earlier attempts.
        claimed: numbers of the calls that were recognized in this attempt.
        settings: digest of the trainer's settings.
        directory: of the call, in this attempt.
        run_id: of this run.
    """
    taken = set(claimed)
    free = [one for one in known_calls if one.ordinal not in taken]
    same_class = [one for one in free if one.trainer_class == call.trainer_class]
    here = [one for one in same_class if directory.path in {used.path for used in one.directories}]
    known = next((one for one in here if one.settings == settings), here[0] if here else None)
    moved_from = None
    if known is None:
        ordinal = _owner_of_checkpoints(call, run_id)
        known = next((one for one in same_class if one.ordinal == ordinal), None)
        if (
            known is None
            and ordinal is not None
            and ordinal not in {one.ordinal for one in known_calls} | taken
        ):
            return IdentifiedCall(call=call.model_copy(update={"ordinal": ordinal}))
    if known is None and settings:
        known = next(
            (
                one
                for one in same_class
                if one.settings == settings
                and one.directories
                and is_same_directory(one.directories[0], directory)
            ),
            None,
        )
        moved_from = known.directories[0].path if known is not None else None
    ordinal = (
        known.ordinal if known is not None else max([0, *taken, *(one.ordinal for one in known_calls)]) + 1
    )
    interrupted = next((one for one in free if one.interrupted and one is not known), None)
    lost = skipped = None
    if known is None:
        # a finished call only at the same position and with equal settings: a loop may have gone on to its next call
        finished = (one for one in same_class if one.finished and one.settings == settings)
        lost = next((one for one in same_class if one is interrupted and one.saved), None) or next(
            (one for one in finished if interrupted is not None or one.ordinal == call.ordinal), None
        )
    if interrupted is not None and lost is None and ordinal > interrupted.ordinal:
        # a call of the same class without a checkpoint may be this one, which has nothing to continue
        skipped = interrupted if interrupted.saved or interrupted not in same_class else None
    return IdentifiedCall(
        call=call.model_copy(update={"ordinal": ordinal}),
        known=known,
        moved_from=moved_from,
        lost=lost,
        repeats=interrupted is not None,
        skipped=skipped,
    )


def _owner_of_checkpoints(call: TrainCall, run_id: str) -> int | None:
    """Return the number of the call that wrote the newest checkpoint of this run and class in the directory."""
    for found in find_checkpoints(*directories_of_run(run_id, Path(call.output_dir))):
        if found.manifest.run_id == run_id and found.manifest.train_call.trainer_class == call.trainer_class:
            return found.manifest.train_call.ordinal
    return None


@dataclass(frozen=True, kw_only=True)
class Mismatch:
    """What the run has and a call does not continue, in one line.

    Attributes:
        serious: work of this run is done again, or left out. Otherwise the script may have meant it.
    """

    text: str
    serious: bool = True


def find_mismatch(
    identified: IdentifiedCall, *, step: int, rejected: bool, output_dir: str
) -> Mismatch | None:
    """Return how a call does not continue what the run has; None if it does.

    Args:
        step: from which the call starts.
        rejected: checkpoints were rejected, and said so.
        output_dir: the call's, as the script has it.
    """
    known, call, lost, skipped = identified.known, identified.call, identified.lost, identified.skipped
    name = call_title(call.ordinal, call.trainer_class, output_dir)
    if lost is not None and step == 0:
        state = "is finished" if lost.finished else f"was interrupted at {lost.progress}"
        return Mismatch(
            text=f"{name} starts from step 0, although {lost.place} of this run {state}: the checkpoints are in"
            f" another output_dir ({_newest(lost)}); give the call the same output_dir in every attempt",
            serious=identified.repeats,
        )
    if skipped is not None:
        return Mismatch(
            text=f"{skipped.place} was interrupted at {skipped.progress}, and the script continues with {name} instead"
            f" of continuing it ({_newest(skipped)}); let the script skip a stage only if it is complete"
        )
    if known is not None and known.saved > step and not (rejected and step):
        gone = (
            f"{known.checkpoint} is gone or cannot be used"
            if known.checkpoint
            else "its snapshot in memory is lost"
        )
        return Mismatch(
            text=f"{name} starts from step {step}, although this run has saved step {known.saved} of it: {gone}",
            serious=step == 0,  # an older checkpoint is what another machine has, where the memory is gone
        )
    return None


def _newest(call: KnownCall) -> str:
    if not call.saved:
        return "no checkpoint of it exists"
    return f"the newest is {call.checkpoint}" if call.checkpoint else f"the newest is of step {call.saved}"


def directory_of(output_dir: str, *, not_before: float, now: float) -> CallDirectory:
    """Return the directory of a call that begins now.

    Args:
        not_before: when the attempt began, in seconds since the epoch.
        now: seconds since the epoch.
    """
    return CallDirectory(
        path=os.path.realpath(output_dir), not_before=not_before, not_after=now, pid=os.getpid()
    )
