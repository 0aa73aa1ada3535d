"""Caps the rollouts of one trainer, and reports why their completions ended.

Called by `train_call.py`. Counts the reasons on the board and journals rollouts in which a cap ended a completion. What caps
do is in `trainers/caps`; without a cap nothing of it is imported and the trainer stays as it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from grpo_run.trainers.caps.end_reasons import CAPPED
from grpo_run.trainers.caps.settings import settings_of
from grpo_run.trainers.hooks.prompts import check_prompts
from grpo_run.trainers.rank.session import Session

if TYPE_CHECKING:
    from grpo_run.trainers.caps.rollout import Rollout

EndReasons = Callable[[], Sequence[str] | None]
"""Returns values of `EndReason`, one for each completion."""


@contextmanager
def capped_rollouts(trainer: Any, session: Session) -> Iterator[EndReasons]:
    """Cap the trainer's rollouts for the length of the block.

    Yields a function that returns why each completion of this rank's last rollout ended; without a cap, it returns None.

    Raises:
        ConfigError: the trainer's backend cannot apply a cap, or a prompt does not fit into the model's window.
    """
    settings = settings_of(trainer, session.config.generation)
    if not settings:
        yield lambda: None
        return
    # imports transformers' generation, which a script that does not generate may not need
    from grpo_run.trainers.caps.capping import Capping

    def report(rollout: Rollout) -> None:
        _report(rollout, session, trainer.state.global_step)

    def end_reasons() -> Sequence[str] | None:
        reasons = capping.end_reasons()
        return None if reasons is None else [reason.value for reason in reasons]

    capping = Capping(trainer, settings, report=report)
    check_prompts(trainer)
    with capping.applied():
        yield end_reasons


def _report(rollout: Rollout, session: Session, step: int) -> None:
    slot, reasons = session.slot, Counter(rollout.reasons)
    for reason, count in reasons.items():
        name = f"ended_{reason.value}"
        setattr(slot, name, getattr(slot, name) + count)
    slot.publish()
    capped = {reason.value: count for reason, count in reasons.items() if reason in CAPPED}
    if capped:
        session.journal.write(
            "completions_capped",
            rank=session.rank,
            step=step,
            completions=len(rollout.reasons),
            decoding_steps=rollout.steps,
            **capped,
        )
