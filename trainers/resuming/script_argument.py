"""Honor the script's own `resume_from_checkpoint`, but never load a damaged or incomplete checkpoint.

True, or a directory in `output_dir`, means the newest checkpoint there; if it cannot be used, an older one is
taken. In later attempts it means what existed before this run, not checkpoints that this run left incomplete.
A directory elsewhere is used or refused, never replaced by another. Called by `choice.py`.
"""

from __future__ import annotations

from pathlib import Path

from grpo_run.runtime.checkpoints.digests import verify_digests
from grpo_run.runtime.checkpoints.manifest import MANIFEST, read_manifest
from grpo_run.runtime.checkpoints.search import find_candidates, step_of
from grpo_run.runtime.errors import CheckpointError, UsageError
from grpo_run.trainers.resuming.fit import check_model, check_world_size, missing_files, unverified_notice
from grpo_run.trainers.resuming.request import (
    RejectedCheckpoint,
    ReportRejected,
    ReshardingProblem,
    ResumeChoice,
    ResumeRequest,
)


def choose_for_script(
    request: ResumeRequest, report: ReportRejected, resharding_problem: ReshardingProblem
) -> ResumeChoice:
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
            return _exactly(request, path, resharding_problem)
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
        problem = _problem(request, path, resharding_problem)
        if problem is None:
            fallback = f"{rejected[0]}; {path.name} is used instead" if rejected else None
            notice = "; ".join(filter(None, [fallback, _notice(request, path)])) or None
            return ResumeChoice(argument=str(path), notice=notice)
        rejected.append(f"{path.name} cannot be used: {problem}")
        report(RejectedCheckpoint(path=path, step=step, reason=problem, own=False))
    if not rejected:
        return ResumeChoice(argument=None)
    raise UsageError(
        f"resume_from_checkpoint={argument}: none of {len(rejected)} checkpoints in {request.output_dir} can"
        f" be used; {rejected[0]}; name another checkpoint, or None to start from step 0"
    )


def _exactly(request: ResumeRequest, path: Path, resharding_problem: ReshardingProblem) -> ResumeChoice:
    """Use the named directory or refuse it."""
    argument = request.script_argument
    problem = _problem(request, path, resharding_problem)
    if problem is not None:
        raise UsageError(
            f"resume_from_checkpoint={argument}: {problem}; to start from its weights only, load them with"
            " from_pretrained"
        )
    return ResumeChoice(argument=argument, from_script=True, notice=_notice(request, path))


def _problem(request: ResumeRequest, path: Path, resharding_problem: ReshardingProblem) -> str | None:
    """Return why a checkpoint cannot be used, or None.

    Raises:
        UsageError: it is verified, but does not fit the run.
    """
    if not (path / MANIFEST).exists():
        return missing_files(path, request.world_size)
    try:
        manifest = read_manifest(path)
        verify_digests(path, manifest.files)
    except CheckpointError as error:
        return str(error)
    check_model(request, path, manifest)
    if check_world_size(request, path, manifest) is None:
        return None
    return resharding_problem(path, request.world_size)


def _notice(request: ResumeRequest, path: Path) -> str | None:
    if (path / MANIFEST).exists():
        return check_world_size(request, path, read_manifest(path))
    return unverified_notice(path, request.world_size)
