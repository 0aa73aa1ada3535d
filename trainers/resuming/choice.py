"""From which checkpoint a `train()` call starts, decided by rank 0 for all.

A call is known by its ordinal in the script, its trainer's class and its `output_dir`. Checkpoints of this
run (or of the run named with `--resume-from`) that belong to the call come first; the script's own
`resume_from_checkpoint` wins on the run's first attempt only, when there is none of ours to lose. What has a
manifest is compared with its digests, what has none must have all its parts; what fails is passed over, and said.
Called by the guard at the start of each call. Reads checkpoints, loads no weights, moves nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from grpo_run.runtime.checkpoints import completeness, world_size
from grpo_run.runtime.checkpoints import manifest as checkpoints
from grpo_run.runtime.checkpoints.manifest import FoundCheckpoint, Manifest, TrainCall
from grpo_run.runtime.checkpoints.model_shape import NamedShape, difference, model_shape
from grpo_run.runtime.checkpoints.world_size import Batch
from grpo_run.runtime.errors import CheckpointError, UsageError


@dataclass(frozen=True, kw_only=True)
class Resume:
    """What to give to `train()`. `own` is set when it has a manifest and belongs to this call.

    `as_asked` says that `argument` is the script's own on each rank, `foreign` that the checkpoint is another run's:
    a call that had finished there may go on here, to more steps.
    """

    argument: str | bool | None
    own: FoundCheckpoint | None = None
    foreign: bool = False
    as_asked: bool = False
    notice: str | None = None

    @property
    def finished(self) -> bool:
        """The call had run to its end: restore it, do not train it again."""
        return self.own is not None and self.own.manifest.finished

    def to_text(self) -> str:
        """For the other ranks."""
        return json.dumps(
            {
                "argument": self.argument,
                "own": str(self.own.path) if self.own else None,
                "foreign": self.foreign,
                "as_asked": self.as_asked,
                "notice": self.notice,
            }
        )

    @classmethod
    def from_text(cls, text: str, *, script_asks: str | bool | None) -> Resume:
        """Rank 0's choice, seen from another rank.

        Raises:
            CheckpointError: this rank cannot see the checkpoint.
        """
        told = json.loads(text)
        if told["as_asked"]:
            return cls(argument=script_asks, as_asked=True, notice=told["notice"])
        own = None
        if told["own"] is not None:
            path = Path(told["own"])
            own = FoundCheckpoint(path=path, manifest=checkpoints.read_manifest(path))
        elif isinstance(told["argument"], str) and not Path(told["argument"]).is_dir():
            raise CheckpointError(f"{told['argument']} is not there")
        return cls(argument=told["argument"], own=own, foreign=told["foreign"], notice=told["notice"])


@dataclass(frozen=True, kw_only=True)
class PassedOver:
    """A checkpoint that is not used. `corrupt`: its bytes prove it bad, so nobody should load it.

    `ours` is false for another run's, which is left where it is.
    """

    path: Path
    step: int | None
    reason: str
    corrupt: bool = False
    ours: bool = True


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
    batch: Batch | None = None
    """The script's; None when not known."""
    parameters: tuple[NamedShape, ...] = ()
    """The model's, before it is wrapped; empty when not known."""
    also_in: tuple[Path, ...] = field(default=())
    """Directories that may hold this run's checkpoints too; at one step `output_dir` comes first."""

    @property
    def output_dir(self) -> Path:
        """Where the script wants its checkpoints."""
        return Path(self.call.output_dir)


CanReshape = Callable[[Path, int], "str | None"]
Tell = Callable[[PassedOver], None]


def _can_reshape(folder: Path, ranks: int) -> str | None:
    from grpo_run.trainers.exact.resharding import resharding_problem

    reason: str | None = resharding_problem(folder, ranks)
    return reason


def choose(question: Question, passed_over: Tell, can_reshape: CanReshape = _can_reshape) -> Resume:
    """Choose for one call, on rank 0.

    Args:
        passed_over: told once of each checkpoint that is not used, and why.
        can_reshape: (checkpoint, ranks) to the reason why another number of ranks cannot go on from it, or None.

    Raises:
        UsageError: what a person named cannot be used, or the newest checkpoint does not fit this run's ranks, batch
            or model. The message says what would.
    """
    told: set[Path] = set()

    def tell(one: PassedOver) -> None:
        if one.path not in told:
            told.add(one.path)
            passed_over(one)

    own = _newest(question, question.run_id, tell, can_reshape, ours=True)
    if own is not None:
        return own
    if question.resume_from is not None:
        return _from_elsewhere(question, tell, can_reshape)
    if question.script_asks:
        return _as_the_script_asks(question, tell, can_reshape)
    return Resume(argument=question.script_asks, notice=_others(question))


def _others(question: Question) -> str | None:
    """That the output directory holds another run's checkpoints."""
    found = next(checkpoints.find(question.output_dir), None)
    if found is None or found.manifest.run_id == question.run_id:
        return None
    return (
        f"{question.call.output_dir} holds checkpoints of run {found.manifest.run_id}; this is"
        f" run {question.run_id} and starts anew (go on from them with --resume-from {found.manifest.run_id})"
    )


def _newest(
    question: Question, run_id: str, tell: Tell, can_reshape: CanReshape, *, ours: bool
) -> Resume | None:
    """The newest intact checkpoint of this call in a run."""
    unfit: str | None = None
    for candidate in checkpoints.candidates(question.output_dir, *question.also_in):
        path, step, manifest = candidate.path, candidate.step, candidate.manifest
        if manifest is None:
            if (
                path / checkpoints.MANIFEST
            ).exists():  # whose it was is not known; corrupt is bad for everyone
                why = candidate.problem or ""
                tell(PassedOver(path=path, step=step, reason=why, corrupt=candidate.corrupt))
            continue
        theirs, call = manifest.train_call, question.call
        belongs = (theirs.ordinal, theirs.trainer_class) == (call.ordinal, call.trainer_class)
        if manifest.run_id != run_id or not belongs:
            continue
        try:
            checkpoints.verify(path, manifest)
        except CheckpointError as error:
            corrupt = not checkpoints.could_not_look(error)
            tell(PassedOver(path=path, step=step, reason=str(error), corrupt=corrupt, ours=ours))
            continue
        _check_model(question, path, manifest)
        notice = _check_ranks(question, path, manifest)
        if notice is not None and (reason := can_reshape(path, question.world_size)) is not None:
            unfit = unfit or f"{path.name}: {reason}; start {manifest.world_size} ranks"
            tell(PassedOver(path=path, step=step, reason=reason, ours=ours))
            continue
        found = FoundCheckpoint(path=path, manifest=manifest)
        return Resume(argument=str(path), own=found, foreign=not ours, notice=notice)
    if unfit is not None:
        raise UsageError(f"no checkpoint in {question.output_dir} fits {question.world_size} ranks: {unfit}")
    return None


def _check_ranks(question: Question, path: Path, manifest: Manifest) -> str | None:
    """What to say when another number of ranks goes on; None when it is the same."""
    if manifest.world_size == question.world_size:
        return None
    written = None
    if manifest.per_device_train_batch_size and manifest.gradient_accumulation_steps:
        written = Batch(
            ranks=manifest.world_size,
            per_device=manifest.per_device_train_batch_size,
            accumulation=manifest.gradient_accumulation_steps,
        )
    refusal = world_size.refusal(
        path.name,
        written_by=manifest.world_size,
        layout=manifest.layout,
        written=written,
        now=question.batch,
        ranks=question.world_size,
    )
    if refusal is not None:
        raise UsageError(refusal)
    assert written is not None
    return world_size.notice(
        path.name, written_by=manifest.world_size, ranks=question.world_size, samples=written.samples
    )


def _check_model(question: Question, path: Path, manifest: Manifest) -> None:
    if manifest.model_shape is None or not question.parameters:
        return
    if model_shape(question.parameters) != manifest.model_shape:
        what = difference(question.parameters, completeness.tensors(path))
        raise UsageError(
            f"{path} is of another model than the script has built: {what}; build the model it was"
            f" saved from, or start another run with --run-id"
        )


def _from_elsewhere(question: Question, tell: Tell, can_reshape: CanReshape) -> Resume:
    assert question.resume_from is not None
    path = Path(question.resume_from)
    as_asked = Resume(argument=question.script_asks, as_asked=True)
    if not path.is_dir():
        found = _newest(question, question.resume_from, tell, can_reshape, ours=False)
        if found is None and question.call.ordinal == 1:
            raise UsageError(
                f"--resume-from {question.resume_from}: neither a checkpoint directory nor a run"
                f" with a complete checkpoint in {question.call.output_dir}"
            )
        return found or as_asked
    if (path / checkpoints.MANIFEST).exists():
        try:
            manifest = checkpoints.read_manifest(path)
            if manifest.train_call.ordinal != question.call.ordinal:
                found = _newest(question, manifest.run_id, tell, can_reshape, ours=False)
                return found or as_asked
            checkpoints.verify(path, manifest)
        except CheckpointError as error:
            raise UsageError(f"--resume-from {path}: {error}; name another checkpoint") from error
        _check_model(question, path, manifest)
        notice = _check_ranks(question, path, manifest)
        if notice is not None and (reason := can_reshape(path, question.world_size)) is not None:
            raise UsageError(f"--resume-from {path}: {reason}; start {manifest.world_size} ranks")
        found_there = FoundCheckpoint(path=path, manifest=manifest)
        return Resume(argument=str(path), own=found_there, foreign=True, notice=notice)
    if not (path / completeness.STATE).is_file():
        raise UsageError(f"--resume-from {path}: no checkpoint (no {completeness.STATE} in it)")
    if path.resolve().parent != question.output_dir.resolve() and question.call.ordinal != 1:
        return as_asked
    lacks = completeness.missing(path, question.world_size, deep=True)
    if lacks:
        raise UsageError(f"--resume-from {path}: {_listed(lacks)}; name another checkpoint")
    return Resume(argument=str(path), notice=_without_digests(path, question.world_size))


def _as_the_script_asks(question: Question, tell: Tell, can_reshape: CanReshape) -> Resume:
    """Its own `resume_from_checkpoint`, but never one that is damaged or half written.

    True, or a directory in `output_dir`, means the newest there: an older one is taken when that one is bad. In later
    attempts it means what was there before this run, not our own half-written directories.
    """
    asks, first = question.script_asks, question.first_attempt
    newest = None
    if isinstance(asks, str):
        path = Path(asks)
        if not path.is_dir():
            return Resume(argument=asks, as_asked=True)  # transformers says what it makes of it
        newest = checkpoints.step_of(path)
        if newest is None or path.resolve().parent != question.output_dir.resolve():
            problem = _problem(question, path, can_reshape)
            if problem is not None:
                raise UsageError(
                    f"resume_from_checkpoint={asks}: {problem}; to begin with its weights alone, load them"
                    " with from_pretrained"
                )
            return Resume(argument=asks, as_asked=True, notice=_note(question, path))
    there = [path for path in _numbered(question.output_dir) if first or _is_before(path, question)]
    if not there:
        return Resume(argument=asks, as_asked=True) if first else Resume(argument=None)
    bad: list[str] = []
    for path in there:
        step = checkpoints.step_of(path)
        assert step is not None
        if newest is not None and step > newest:
            continue
        problem = _problem(question, path, can_reshape)
        if problem is None:
            instead = f"{bad[0]}; {path.name} is used instead of it" if bad else None
            said = "; ".join(filter(None, [instead, _note(question, path)])) or None
            return Resume(argument=str(path), notice=said)
        bad.append(f"{path.name} is not complete: {problem}")
        tell(PassedOver(path=path, step=step, reason=problem, ours=False))
    if not bad:
        return Resume(argument=None)
    raise UsageError(
        f"resume_from_checkpoint={asks}: none of {len(bad)} checkpoints in {question.output_dir} can be used;"
        f" {bad[0]}; give another, or none to start anew"
    )


def _numbered(output_dir: Path) -> Iterator[Path]:
    return (candidate.path for candidate in checkpoints.candidates(output_dir))


def _is_before(path: Path, question: Question) -> bool:
    return path.stat().st_mtime < question.run_started_at


def _problem(question: Question, path: Path, can_reshape: CanReshape) -> str | None:
    """Why a checkpoint that the script may mean cannot be used.

    Raises:
        UsageError: it is intact and does not fit.
    """
    if not (path / checkpoints.MANIFEST).exists():
        lacks = completeness.missing(path, question.world_size, deep=True)
        return _listed(lacks) if lacks else None
    try:
        manifest = checkpoints.read_manifest(path)
        checkpoints.verify(path, manifest)
    except CheckpointError as error:
        return str(error)
    _check_model(question, path, manifest)
    if _check_ranks(question, path, manifest) is None:
        return None
    return can_reshape(path, question.world_size)


def _note(question: Question, path: Path) -> str | None:
    if (path / checkpoints.MANIFEST).exists():
        return _check_ranks(question, path, checkpoints.read_manifest(path))
    return _without_digests(path, question.world_size)


def _without_digests(path: Path, ranks: int) -> str:
    text = f"{path} has all its parts and no manifest: accepted without digests"
    written_by = completeness.ranks(path)
    if written_by not in (None, ranks):
        text += (
            f"; it was written by {written_by} ranks, this run has {ranks}, and whether a step takes as many samples"
            " as before cannot be told"
        )
    return text


def _listed(lacks: list[str]) -> str:
    more = len(lacks) - 3
    return ", ".join(lacks[:3]) + (f" and {more} more" if more > 0 else "")
