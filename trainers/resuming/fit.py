"""Does a checkpoint fit this run? Compares its model, world size and batch with the request's.

Also judges checkpoints without a manifest, which must have all required files. Called by `choice.py` and
`script_argument.py`. Does not compare digests (`runtime.checkpoints.manifest.verify`).
"""

from __future__ import annotations

from pathlib import Path

from grpo_run.runtime.checkpoints import completeness, world_size
from grpo_run.runtime.checkpoints.manifest import Manifest
from grpo_run.runtime.checkpoints.model_shape import difference, model_shape
from grpo_run.runtime.checkpoints.world_size import Batch
from grpo_run.runtime.errors import UsageError
from grpo_run.trainers.resuming.request import ResumeRequest

MAX_LISTED_FILES = 3
"""Missing files that an error message lists."""


def exact_resharding_problem(folder: Path, ranks: int) -> str | None:
    """Return why `ranks` ranks cannot resume the exact state of a checkpoint, or None."""
    # imports torch, which the script may have to import first
    from grpo_run.trainers.exact.resharding import resharding_problem

    reason: str | None = resharding_problem(folder, ranks)
    return reason


def check_model(request: ResumeRequest, path: Path, manifest: Manifest) -> None:
    """Compare the model of a checkpoint with the script's, if both are known.

    Raises:
        UsageError: they differ; the message names the parameters.
    """
    if manifest.model_shape is None or not request.parameters:
        return
    if model_shape(request.parameters) != manifest.model_shape:
        what = difference(request.parameters, completeness.tensors(path))
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
        saved_batch = Batch(
            ranks=manifest.world_size,
            per_device=manifest.per_device_train_batch_size,
            accumulation=manifest.gradient_accumulation_steps,
        )
    refusal = world_size.refusal(
        path.name,
        written_by=manifest.world_size,
        layout=manifest.layout,
        written=saved_batch,
        now=request.batch,
        ranks=request.world_size,
    )
    if refusal is not None:
        raise UsageError(refusal)
    assert saved_batch is not None, "without the saved batch, another world size is refused"
    return world_size.notice(
        path.name, written_by=manifest.world_size, ranks=request.world_size, samples=saved_batch.samples
    )


def missing_files(path: Path, ranks: int) -> str | None:
    """Return the missing or damaged files of a checkpoint without a manifest as one phrase, or None."""
    missing = completeness.missing(path, ranks, deep=True)
    if not missing:
        return None
    more = len(missing) - MAX_LISTED_FILES
    return ", ".join(missing[:MAX_LISTED_FILES]) + (f" and {more} more" if more > 0 else "")


def unverified_notice(path: Path, ranks: int) -> str:
    """Return the message for the user about a complete checkpoint without a manifest."""
    text = f"{path} has all required files but no manifest: accepted without verifying digests"
    saved_by = completeness.ranks(path)
    if saved_by not in (None, ranks):
        text += (
            f"; it was saved by {saved_by} ranks and this run has {ranks}, and without a manifest it is not"
            " known whether a step has as many samples as before"
        )
    return text
