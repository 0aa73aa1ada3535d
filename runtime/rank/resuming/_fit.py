"""Does a checkpoint fit this run? Compares its model, world size and batch with the request's.

Also judges checkpoints without a manifest, which must have all required files. Called by
`choice.py`. Does not compare digests (`runtime.checkpoints.digests`).
"""

from __future__ import annotations

from pathlib import Path

from grpo_run.runtime.checkpoints.compatibility import (
    BatchGeometry,
    describe_model_difference,
    describe_world_size_change,
    digest_model_shape,
    explain_world_size_mismatch,
)
from grpo_run.runtime.checkpoints.completeness import count_ranks, find_problems, saved_tensors
from grpo_run.runtime.checkpoints.manifest import Manifest
from grpo_run.runtime.errors import UsageError
from grpo_run.runtime.rank.exact.geometry import resharding_problem
from grpo_run.runtime.rank.resuming.request import ResumeRequest

MAX_LISTED_FILES = 3
"""Missing files that an error message lists."""


def check_fit(request: ResumeRequest, path: Path, manifest: Manifest) -> tuple[str | None, str | None]:
    """Compare a checkpoint with this run: its model, world size and batch.

    Returns:
        a message for the user about what changes, and why this run cannot resume the checkpoint although its
        settings fit; each None if there is nothing to say.

    Raises:
        UsageError: the settings do not fit; the message says what would help.
    """
    check_model(request, path, manifest)
    notice = check_world_size(request, path, manifest)
    return notice, resharding_problem(path, request.world_size) if notice is not None else None


def check_model(request: ResumeRequest, path: Path, manifest: Manifest) -> None:
    """Compare the model of a checkpoint with the script's, if both are known.

    Raises:
        UsageError: they differ; the message names the parameters.
    """
    if manifest.model_shape is None or not request.parameters:
        return
    if digest_model_shape(request.parameters) != manifest.model_shape:
        what = describe_model_difference(request.parameters, saved_tensors(path))
        raise UsageError(
            f"{path} contains another model than the script has built: {what}; build the model that was"
            " saved, or start another run with --run-id"
        )


def check_world_size(request: ResumeRequest, path: Path, manifest: Manifest) -> str | None:
    """Compare the world size and batch of a checkpoint with this run's.

    Returns:
        None for the same world size, else a message for the user about what changes.

    Raises:
        UsageError: this run cannot resume the checkpoint; the message says which settings can.
    """
    if manifest.world_size == request.world_size:
        return None
    saved_batch = None
    if manifest.per_device_train_batch_size and manifest.gradient_accumulation_steps:
        saved_batch = BatchGeometry(
            ranks=manifest.world_size,
            per_device=manifest.per_device_train_batch_size,
            accumulation=manifest.gradient_accumulation_steps,
        )
    refusal = explain_world_size_mismatch(
        path.name,
        written_by=manifest.world_size,
        layout=manifest.layout,
        written_batch=saved_batch,
        current_batch=request.batch,
        ranks=request.world_size,
    )
    if refusal is not None:
        raise UsageError(refusal)
    assert saved_batch is not None, "without the saved batch, another world size is refused"
    return describe_world_size_change(
        path.name, written_by=manifest.world_size, ranks=request.world_size, samples=saved_batch.samples
    )


def missing_files(path: Path, ranks: int) -> str | None:
    """Return the missing or damaged files of a checkpoint without a manifest as one phrase, or None."""
    missing = find_problems(path, ranks, verify_checksums=True)
    if not missing:
        return None
    more = len(missing) - MAX_LISTED_FILES
    return ", ".join(missing[:MAX_LISTED_FILES]) + (f" and {more} more" if more > 0 else "")


def unverified_notice(path: Path, ranks: int) -> str:
    """Return the message for the user about a complete checkpoint without a manifest."""
    text = f"{path} has all required files but no manifest: accepted without verifying digests"
    saved_by = count_ranks(path)
    if saved_by not in (None, ranks):
        text += (
            f"; it was saved by {saved_by} ranks and this run has {ranks}, and without a manifest it is not"
            " known whether a step has as many samples as before"
        )
    return text
