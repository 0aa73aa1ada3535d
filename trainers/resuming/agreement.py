"""Rank 0's choice of a checkpoint, made every rank's: told over the vote group, and seen by all before any loads it.

Called by the guard at the start of a `train()` call. Does not choose (`choice.py`).
"""

from __future__ import annotations

from typing import Any

from grpo_run.runtime.checkpoints import publishing
from grpo_run.runtime.errors import CheckpointError, ConfigError
from grpo_run.trainers.rank.session import Session
from grpo_run.trainers.resuming import choice as resuming
from grpo_run.trainers.resuming.choice import PassedOver, Question, Resume
from grpo_run.watchdog.causes import Cause


def agree(session: Session, question: Question) -> Resume:
    """The one choice. Collective: every rank calls it at the same point.

    Raises:
        UsageError: on rank 0, as `resuming.choose`.
        ConfigError: a rank does not see what rank 0 has chosen.
    """
    if session.is_main:
        choice = resuming.choose(question, lambda one: pass_over(session, one))
        _tell(session.votes, choice.to_text())
        problem = None
    else:
        text = _tell(session.votes, "")
        choice, problem = Resume(argument=None), None
        try:
            choice = Resume.from_text(text, script_asks=question.script_asks)
        except CheckpointError as error:
            problem = error
    blind = [rank for rank, (sees,) in enumerate(session.votes.gather([int(problem is None)])) if not sees]
    if blind:
        who = f"rank {blind[0]} does" if len(blind) == 1 else f"ranks {', '.join(map(str, blind))} do"
        raise ConfigError(
            f"{who} not see the checkpoint that rank 0 goes on from in {question.call.output_dir}"
            + (f" ({problem})" if problem else "")
            + "; it must be a directory that all nodes share"
        )
    return choice


def _tell(votes: Any, text: str) -> str:
    """Rank 0's text, on every rank; the others bring none."""
    mine = text.encode()
    length = votes.maximum(len(mine))
    told: list[int] = votes.gather(list(mine.ljust(length, b" ")))[0]
    return bytes(told).decode().rstrip(" ")


def pass_over(session: Session, one: PassedOver) -> None:
    """Journal and say that a checkpoint is not used; one of ours that is proved bad is renamed aside."""
    moved = publishing.reject(one.path, one.reason) if one.corrupt and one.ours else None
    cause = {"cause": str(Cause.checkpoint_corrupt)} if one.corrupt else {}
    session.journal.write(
        "checkpoint_rejected",
        rank=session.rank,
        step=one.step,
        path=str(one.path),
        reason=one.reason,
        moved_to=str(moved) if moved else None,
        **cause,
    )
    if moved is not None:
        fate = f"; it is kept as {moved.name}"
    elif one.corrupt and one.ours:
        fate = "; it could not be renamed and is passed over where it is"
    else:
        fate = ""
    session.say(f"checkpoint {one.path} is not used: {one.reason}{fate}")
