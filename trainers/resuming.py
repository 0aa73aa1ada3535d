"""From which checkpoint a `train()` call starts, decided by rank 0 for all.

A call is known by its ordinal in the script, its trainer's class and its `output_dir`. Checkpoints of this
run (or of the run named with `--resume-from`) that belong to the call come first; the script's own
`resume_from_checkpoint` wins on the run's first attempt only, when there is none of ours to lose.
Called by the guard at the start of each call. Reads manifests; loads no weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from grpo_run.runtime import checkpoints
from grpo_run.runtime.checkpoints import FoundCheckpoint, TrainCall
from grpo_run.runtime.errors import CheckpointError, UsageError


@dataclass(frozen=True, kw_only=True)
class Resume:
    """What to give to `train()`. `own` is set when it is a checkpoint of this run."""

    argument: str | bool | None
    own: FoundCheckpoint | None = None
    foreign: bool = False
    """It is another run's: a call that had finished there may go on here, to more steps."""
    notice: str | None = None

    @property
    def finished(self) -> bool:
        """The call had run to its end: restore it, do not train it again."""
        return self.own is not None and self.own.manifest.finished


@dataclass(frozen=True, kw_only=True)
class Question:
    """Everything the choice depends on."""

    call: TrainCall
    run_id: str
    world_size: int
    first_attempt: bool
    run_started_at: float
    script_asks: str | bool | None
    resume_from: str | None
    only_step: int | None = None
    """On ranks other than 0: the step rank 0 has chosen and verified, -1 for none of ours."""


def choose(question: Question, rejected: Callable[[FoundCheckpoint, str], None]) -> Resume:
    """Choose for one call: rank 0 first, the others then bound to its step.

    Args:
        rejected: told of each checkpoint that was passed over, and why.

    Raises:
        UsageError: `--resume-from` names nothing that can be used.
    """
    own = _newest(question, {question.run_id}, rejected)
    if own is not None:
        return Resume(argument=str(own.path), own=own)
    if question.resume_from is not None:
        return _from_elsewhere(question, rejected)
    if not question.first_attempt and _may_be_ours(question):
        # our own half-written directories must not be taken for what the script meant
        before = _newest_before_run(Path(question.call.output_dir), question.run_started_at)
        return Resume(argument=str(before) if before else None)
    notice = None
    if not question.script_asks:
        foreign = next((found for found in checkpoints.find(Path(question.call.output_dir))), None)
        if foreign is not None and foreign.manifest.run_id != question.run_id:
            notice = (
                f"{question.call.output_dir} holds checkpoints of run {foreign.manifest.run_id}; this is"
                f" run {question.run_id} and starts anew (go on from them with --resume-from {foreign.manifest.run_id})"
            )
    return Resume(argument=question.script_asks, notice=notice)


def _may_be_ours(question: Question) -> bool:
    """The script asks for the newest, or for a directory of `output_dir` written since the run began."""
    if not isinstance(question.script_asks, str):
        return question.script_asks is True
    path, output_dir = Path(question.script_asks), Path(question.call.output_dir)
    return (
        path.is_dir()
        and path.resolve().parent == output_dir.resolve()
        and path.stat().st_mtime >= question.run_started_at
    )


def _from_elsewhere(question: Question, rejected: Callable[[FoundCheckpoint, str], None]) -> Resume:
    assert question.resume_from is not None
    path = Path(question.resume_from)
    if path.is_dir():
        try:
            manifest = checkpoints.read_manifest(path)
        except CheckpointError as error:
            if not (path / "trainer_state.json").is_file():
                raise UsageError(
                    f"--resume-from {path}: no checkpoint (no trainer_state.json in it)"
                ) from error
            here = (
                path.resolve().parent == Path(question.call.output_dir).resolve()
                or question.call.ordinal == 1
            )
            return Resume(argument=str(path) if here else question.script_asks)
        if manifest.train_call.ordinal == question.call.ordinal:
            if question.only_step is None:  # rank 0 verifies for all
                try:
                    checkpoints.verify(path, manifest)
                except CheckpointError as error:
                    raise UsageError(f"--resume-from {path}: {error}") from error
            return Resume(argument=str(path), own=FoundCheckpoint(path=path, manifest=manifest), foreign=True)
        found = _newest(question, {manifest.run_id}, rejected)
    else:
        found = _newest(question, {question.resume_from}, rejected)
        if found is None and question.call.ordinal == 1:
            raise UsageError(
                f"--resume-from {question.resume_from}: neither a checkpoint directory nor a run"
                f" with a complete checkpoint in {question.call.output_dir}"
            )
    return (
        Resume(argument=str(found.path), own=found, foreign=True)
        if found
        else Resume(argument=question.script_asks)
    )


def _newest(
    question: Question, run_ids: set[str], rejected: Callable[[FoundCheckpoint, str], None]
) -> FoundCheckpoint | None:
    for found in checkpoints.find(Path(question.call.output_dir)):
        manifest = found.manifest
        if manifest.run_id not in run_ids:
            continue
        theirs, ours = manifest.train_call, question.call
        if (theirs.ordinal, theirs.trainer_class) != (ours.ordinal, ours.trainer_class):
            continue
        if manifest.world_size != question.world_size:
            rejected(found, f"written by {manifest.world_size} ranks, this run has {question.world_size}")
            continue
        if question.only_step is not None:
            if manifest.step == question.only_step:
                return found
            continue
        try:
            checkpoints.verify(found.path, manifest)
        except CheckpointError as error:
            rejected(found, str(error))
            continue
        return found
    return None


def _newest_before_run(output_dir: Path, started_at: float) -> Path | None:
    """The newest `checkpoint-N` that was there before this run, complete by manifest or by age."""
    candidates = []
    for path in output_dir.glob("checkpoint-*"):
        number = path.name.rpartition("-")[2]
        if number.isdigit() and (path / "trainer_state.json").is_file() and path.stat().st_mtime < started_at:
            candidates.append((int(number), path))
    return max(candidates)[1] if candidates else None
