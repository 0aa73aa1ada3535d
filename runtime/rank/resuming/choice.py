"""Choose the checkpoint that a `train()` call starts from, on rank 0 for all ranks.

A call is identified by its number in the run (`identification.py`) and its trainer's class. In this order:

1. the newest verified checkpoint of this run that belongs to the call, or its snapshot in memory;
2. the same of the run or directory given with `--resume-from`;
3. the script's own `resume_from_checkpoint`: True, or a directory in `output_dir`, means the newest
   checkpoint there, or an older one if it cannot be used. In later attempts it means what existed before
   this run, not checkpoints that this run left incomplete. A directory elsewhere is used or refused, never
   replaced.

A checkpoint with a manifest is verified against its digests; one without must have all required files. One
that is not used is reported, and a damaged or incomplete one is never loaded. `agree` sends the choice to
all ranks and checks that each can see the checkpoint; `runtime/rank/step/resume.py` calls it at the start
of each call. Loads no weights and moves no files.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from grpo_run.runtime.checkpoints.completeness import TRAINER_STATE
from grpo_run.runtime.checkpoints.digests import is_read_error, verify_digests
from grpo_run.runtime.checkpoints.manifest import MANIFEST, read_manifest
from grpo_run.runtime.checkpoints.publishing import reject_checkpoint
from grpo_run.runtime.checkpoints.search import (
    FoundCheckpoint,
    directories_of_run,
    find_candidates,
    find_checkpoints,
    output_directory_of,
    snapshot_directories,
    step_of,
)
from grpo_run.runtime.errors import CheckpointError, ConfigError, UsageError
from grpo_run.runtime.history.events import CheckpointRejected
from grpo_run.runtime.rank.resuming._fit import check_fit, missing_files, unverified_notice
from grpo_run.runtime.rank.resuming.request import (
    RejectedCheckpoint,
    ReportRejected,
    ResumeChoice,
    ResumeRequest,
)
from grpo_run.runtime.rank.session import Session
from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.text import rank_names


def choose_for_script(request: ResumeRequest, report: ReportRejected) -> ResumeChoice:
    """Choose the checkpoint that the script's argument means.

    Args:
        report: called for each checkpoint that is not used.

    Raises:
        UsageError: the checkpoint cannot be used, and there is no older one.
    """
    argument = request.script_argument
    newest_step = None
    if isinstance(argument, str):
        path = Path(argument)
        if not path.is_dir():
            return ResumeChoice(argument=argument, from_script=True)  # transformers raises its own error
        newest_step = step_of(path)
        if newest_step is None or path.resolve().parent != request.output_dir.resolve():
            return _exactly(request, path)
    paths = [candidate.path for candidate in find_candidates(request.output_dir)]
    if not request.first_attempt:
        paths = [path for path in paths if path.stat().st_mtime < request.run_started_at]
    if not paths:
        if request.first_attempt:
            return ResumeChoice(argument=argument, from_script=True)
        return ResumeChoice(argument=None)
    rejected: list[str] = []
    for path in paths:
        step = step_of(path)
        assert step is not None, "candidates are named checkpoint-N"
        if newest_step is not None and step > newest_step:
            continue
        notice, problem = _judged(request, path)
        if problem is None:
            fallback = f"{rejected[0]}; {path.name} is used instead" if rejected else None
            notice = "; ".join(filter(None, [fallback, notice])) or None
            return ResumeChoice(argument=str(path), notice=notice)
        rejected.append(f"{path.name} cannot be used: {problem}")
        report(RejectedCheckpoint(path=path, step=step, reason=problem, own=False))
    if not rejected:
        return ResumeChoice(argument=None)
    raise UsageError(
        f"resume_from_checkpoint={argument}: none of {len(rejected)} checkpoints in {request.output_dir} can"
        f" be used; {rejected[0]}; name another checkpoint, or None to start from step 0"
    )


def _exactly(request: ResumeRequest, path: Path) -> ResumeChoice:
    """Use the named directory or refuse it."""
    argument = request.script_argument
    notice, problem = _judged(request, path)
    if problem is not None:
        raise UsageError(
            f"resume_from_checkpoint={argument}: {problem}; to start from its weights only, load them with"
            " from_pretrained"
        )
    return ResumeChoice(argument=argument, from_script=True, notice=notice)


def _judged(request: ResumeRequest, path: Path) -> tuple[str | None, str | None]:
    """Return the notice about a checkpoint that is used, and why it cannot be used; see `check_fit`.

    Raises:
        UsageError: it is verified, but does not fit the run.
    """
    if not (path / MANIFEST).exists():
        return unverified_notice(path, request.world_size), missing_files(path, request.world_size)
    try:
        manifest = read_manifest(path)
        verify_digests(path, manifest.files)
    except CheckpointError as error:
        return None, str(error)
    return check_fit(request, path, manifest)


def choose(request: ResumeRequest, report_rejected: ReportRejected) -> ResumeChoice:
    """Choose the checkpoint for one call.

    Args:
        report_rejected: called once for each checkpoint that is not used.

    Raises:
        UsageError: a checkpoint that the user named cannot be used, the newest checkpoint does not fit
            this run's world size, batch or model, or the output directory has checkpoints of another run
            that has not finished, or of an earlier run with the id of a new one. The message says what
            would help.
    """
    reported: set[Path] = set()

    def report(rejected: RejectedCheckpoint) -> None:
        if rejected.path not in reported:
            reported.add(rejected.path)
            report_rejected(rejected)

    own = _newest_of_run(request, request.run_id, report, own=True)
    if own is not None:
        _refuse_used_id(request, own)
        return replace(own, reopened=request.reopened)
    if request.resume_from is not None:
        return _resume_from(request, request.resume_from, report)
    if request.script_argument:
        return choose_for_script(request, report)
    return ResumeChoice(argument=request.script_argument, notice=_other_run_notice(request))


def _refuse_used_id(request: ResumeRequest, own: ResumeChoice) -> None:
    """Refuse to continue an earlier run with the same id although a new one was asked for.

    Raises:
        UsageError: `--fresh` was given, and its first attempt has found a checkpoint of its own id.
    """
    if request.fresh and request.first_attempt and own.checkpoint is not None:
        raise UsageError(
            f"--fresh: {own.checkpoint.path} (step {own.checkpoint.manifest.step}) is of an earlier run with"
            f" the same id, {request.run_id}; give the new run another with --run-id"
        )


def _other_run_notice(request: ResumeRequest) -> str | None:
    """Return the message about checkpoints of another run in the output directory, or None.

    Raises:
        UsageError: the other run has not finished, so training from step 0 would delete its checkpoints one
            by one.
    """
    snapshots = snapshot_directories(request.output_dir)
    found = next(find_checkpoints(request.output_dir, *snapshots), None)
    if found is None or found.manifest.run_id == request.run_id:
        return None
    directory, other, step = request.call.output_dir, found.manifest.run_id, found.manifest.step
    if found.manifest.finished or request.fresh:
        return (
            f"{directory} contains checkpoints of run {other}; this run is {request.run_id} and"
            f" starts from step 0 (to resume from them, use --resume-from {other})"
        )
    raise UsageError(
        f"{directory} contains checkpoints of run {other}, which has not finished (step {step}). Resume from"
        f" them with --resume-from {other}, start over in this directory with --fresh, or give another"
        " output_dir"
    )


def _newest_of_run(
    request: ResumeRequest, run_id: str, report: ReportRejected, *, own: bool
) -> ResumeChoice | None:
    """Return the newest verified checkpoint of this call in a run, or None if there is none.

    Raises:
        UsageError: none of the checkpoints fits this run.
    """
    refusal: str | None = None
    notice_in_memory: str | None = None
    in_memory = request.in_memory if own else None
    if in_memory is not None:
        newest, saved_by = in_memory.path, in_memory.manifest
        notice_in_memory, problem = check_fit(request, newest, saved_by)
        if problem is not None:
            refusal = f"{newest.name}: {problem}; start {saved_by.world_size} ranks"
            report(RejectedCheckpoint(path=newest, step=saved_by.step, reason=problem, own=own))
            in_memory = None
    for candidate in find_candidates(*directories_of_run(run_id, request.output_dir, *request.also_search)):
        path, step, manifest = candidate.path, candidate.step, candidate.manifest
        if in_memory is not None and step < in_memory.manifest.step:
            break
        if manifest is None:
            # the manifest is invalid, so the run is not known; a corrupt checkpoint is corrupt for every run
            if (path / MANIFEST).exists():
                reason = candidate.problem or ""
                report(RejectedCheckpoint(path=path, step=step, reason=reason, corrupt=candidate.corrupt))
            continue
        saved, call = manifest.train_call, request.call
        same_call = (saved.ordinal, saved.trainer_class) == (call.ordinal, call.trainer_class)
        if manifest.run_id != run_id or not same_call:
            continue
        if in_memory is not None and step == in_memory.manifest.step and not manifest.finished:
            break
        try:
            verify_digests(path, manifest.files)
        except CheckpointError as error:
            corrupt = not is_read_error(error)
            report(RejectedCheckpoint(path=path, step=step, reason=str(error), corrupt=corrupt, own=own))
            continue
        notice, problem = check_fit(request, path, manifest)
        if problem is not None:
            refusal = refusal or f"{path.name}: {problem}; start {manifest.world_size} ranks"
            report(RejectedCheckpoint(path=path, step=step, reason=problem, own=own))
            continue
        checkpoint = FoundCheckpoint(path=path, manifest=manifest)
        return ResumeChoice(argument=str(path), checkpoint=checkpoint, foreign=not own, notice=notice)
    if in_memory is not None:
        return ResumeChoice(
            argument=str(in_memory.path), checkpoint=in_memory, in_memory=True, notice=notice_in_memory
        )
    if refusal is not None:
        raise UsageError(
            f"no checkpoint in {request.output_dir} can be resumed by {request.world_size} ranks: {refusal}"
        )
    return None


def _resume_from(request: ResumeRequest, target: str, report: ReportRejected) -> ResumeChoice:
    """Resume from the run id or the directory given with `--resume-from`."""
    path = Path(target)
    script_choice = ResumeChoice(argument=request.script_argument, from_script=True)
    if not path.is_dir():
        choice = _newest_of_run(request, target, report, own=False)
        if choice is None and request.call.ordinal == 1:
            raise UsageError(
                f"--resume-from {target}: neither a checkpoint directory nor a run with a complete checkpoint"
                f" in {request.call.output_dir}"
            )
        return choice or script_choice
    if (path / MANIFEST).exists():
        try:
            manifest = read_manifest(path)
            if manifest.train_call.ordinal < request.call.ordinal:
                return script_choice  # what the other run did after the named checkpoint is done anew
            if manifest.train_call.ordinal > request.call.ordinal:
                choice = _newest_of_run(request, manifest.run_id, report, own=False)
                return choice or script_choice
            verify_digests(path, manifest.files)
        except CheckpointError as error:
            raise UsageError(f"--resume-from {path}: {error}; name another checkpoint") from error
        notice, problem = check_fit(request, path, manifest)
        if problem is not None:
            raise UsageError(f"--resume-from {path}: {problem}; start {manifest.world_size} ranks")
        checkpoint = FoundCheckpoint(path=path, manifest=manifest)
        return ResumeChoice(argument=str(path), checkpoint=checkpoint, foreign=True, notice=notice)
    if not (path / TRAINER_STATE).is_file():
        raise UsageError(f"--resume-from {path}: not a checkpoint (it has no {TRAINER_STATE})")
    if path.resolve().parent != request.output_dir.resolve() and request.call.ordinal != 1:
        return script_choice
    notice, missing = _judged(request, path)
    if missing:
        raise UsageError(f"--resume-from {path}: {missing}; name another checkpoint")
    return ResumeChoice(argument=str(path), notice=notice)


def agree(session: Session, request: ResumeRequest) -> ResumeChoice:
    """Return the same choice on every rank. Collective.

    Raises:
        UsageError: on rank 0, see `choose`.
        ConfigError: a rank cannot see the checkpoint that rank 0 has chosen.
    """
    if session.is_main:
        choice = choose(request, lambda rejected: reject(session, rejected))
        fence = session.fence(request.output_dir)
        choice = replace(choice, ordinal=request.call.ordinal, fence=str(fence) if fence else None)
        _broadcast(session.votes, choice.to_text())
        problem = None
    else:
        text = _broadcast(session.votes, "")
        choice, problem = ResumeChoice(argument=None), None
        try:
            choice = ResumeChoice.from_text(text, request)
        except CheckpointError as error:
            problem = error
    visible = session.votes.gather([int(problem is None)])
    blind = [rank for rank, (sees,) in enumerate(visible) if not sees]
    if blind:
        who = f"{rank_names(blind)} {'does' if len(blind) == 1 else 'do'}"
        raise ConfigError(
            f"{who} not see the checkpoint that rank 0 resumes from in {request.call.output_dir}"
            + (f" ({problem})" if problem else "")
            + "; the directory must be shared by all nodes"
        )
    return choice


def _broadcast(votes: Any, text: str) -> str:
    """Return rank 0's text on every rank; the other ranks pass an empty text."""
    content = text.encode()
    length = votes.maximum(len(content))
    received: list[int] = votes.gather(list(content.ljust(length, b" ")))[0]
    return bytes(received).decode().rstrip(" ")


def reject(session: Session, rejected: RejectedCheckpoint) -> None:
    """Journal and print that a checkpoint is not used; rename a corrupt checkpoint of this run."""
    path, reason = rejected.path, rejected.reason
    session.rejected_checkpoints += 1
    own_corrupt = rejected.corrupt and rejected.own
    fence = session.fence(output_directory_of(path))
    renamed = reject_checkpoint(path, reason, fence=fence) if own_corrupt else None
    cause = str(Cause.checkpoint_corrupt) if rejected.corrupt else None
    session.journal.write(
        CheckpointRejected(
            rank=session.rank,
            step=rejected.step,
            path=str(path),
            reason=reason,
            moved_to=str(renamed) if renamed else None,
            cause=cause,
        )
    )
    if renamed is not None:
        consequence = f"; it is renamed to {renamed.name}"
    elif own_corrupt:
        consequence = "; it could not be renamed and stays in place"
    else:
        consequence = ""
    session.notify(f"checkpoint {path} is not used: {reason}{consequence}")
