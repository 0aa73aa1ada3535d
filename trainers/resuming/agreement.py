"""Send rank 0's choice of a checkpoint to all ranks, and check that every rank can see the checkpoint.

Called by the guard at the start of a `train()` call. Does not choose (`choice.py`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from grpo_run.runtime.checkpoints.publishing import reject_checkpoint
from grpo_run.runtime.errors import CheckpointError, ConfigError
from grpo_run.trainers.rank.session import Session
from grpo_run.trainers.resuming.choice import choose
from grpo_run.trainers.resuming.request import RejectedCheckpoint, ResumeChoice, ResumeRequest
from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.rank_names import rank_names


def agree(session: Session, request: ResumeRequest) -> ResumeChoice:
    """Return the same choice on every rank. Collective.

    Raises:
        UsageError: on rank 0, see `choice.choose`.
        ConfigError: a rank cannot see the checkpoint that rank 0 has chosen.
    """
    if session.is_main:
        choice = choose(request, lambda rejected: reject(session, rejected))
        choice = replace(choice, ordinal=request.call.ordinal)
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
    renamed = reject_checkpoint(path, reason) if own_corrupt else None
    cause = {"cause": str(Cause.checkpoint_corrupt)} if rejected.corrupt else {}
    session.journal.write(
        "checkpoint_rejected",
        rank=session.rank,
        step=rejected.step,
        path=str(path),
        reason=reason,
        moved_to=str(renamed) if renamed else None,
        **cause,
    )
    if renamed is not None:
        consequence = f"; it is renamed to {renamed.name}"
    elif own_corrupt:
        consequence = "; it could not be renamed and stays in place"
    else:
        consequence = ""
    session.notify(f"checkpoint {path} is not used: {reason}{consequence}")
