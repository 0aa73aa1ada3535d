"""Caps the rollouts of one trainer, and reports why their completions ended.

Called by `train_call.py`. Counts the reasons on the board, journals rollouts in which a cap ended a completion, and with a
deadline every rollout, so that it ends after the same token when it is generated again. What caps do is in `trainers/caps`;
without a cap the trainer stays as it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from grpo_run.runtime.record.run_directory import RunDirectory
from grpo_run.trainers.caps.decisions import EVENT, Decision, RolloutKey, read_decisions
from grpo_run.trainers.caps.end_reasons import CAPPED
from grpo_run.trainers.caps.settings import CapSettings, settings_of
from grpo_run.trainers.hooks.prompts import check_prompts
from grpo_run.trainers.rank.session import Session

if TYPE_CHECKING:
    from grpo_run.trainers.caps.rollout import Rollout

EndReasons = Callable[[], Sequence[str] | None]
"""Returns values of `EndReason`, one for each completion."""


@contextmanager
def capped_rollouts(
    trainer: Any, session: Session, train_call: int | None, timed_out: Callable[[], None] = lambda: None
) -> Iterator[EndReasons]:
    """Cap the trainer's rollouts for the length of the block.

    Yields a function that returns why each completion of this rank's last rollout ended; without a cap, it returns None.

    Args:
        train_call: the number of the call; None for one inside another call's step.
        timed_out: called when a deadline has ended a rollout of this rank.

    Raises:
        ConfigError: the trainer's backend cannot apply a cap, or a prompt does not fit into the model's window.
    """
    settings = settings_of(trainer, session.config.generation)
    if not settings:
        yield lambda: None
        return
    # imports transformers' generation, which a script that does not generate may not need
    from grpo_run.trainers.caps.capping import Capping

    reports = RolloutReports(trainer, session, settings, train_call, timed_out)
    capping = Capping(trainer, settings, report=reports.ended, decided=reports.begin)
    check_prompts(trainer)

    def end_reasons() -> Sequence[str] | None:
        reasons = capping.end_reasons()
        return None if reasons is None else [reason.value for reason in reasons]

    with capping.applied():
        yield end_reasons


class RolloutReports:
    """Numbers the rollouts of one `train()` call on this rank and reports each.

    Args:
        train_call: the number of the call; without one, rollouts have no numbers and end by the clock alone.
        timed_out: called when a deadline has ended a rollout.
    """

    def __init__(
        self,
        trainer: Any,
        session: Session,
        settings: CapSettings,
        train_call: int | None,
        timed_out: Callable[[], None] = lambda: None,
    ) -> None:
        self._timed_out = timed_out
        self._trainer = trainer
        self._session = session
        self._train_call = train_call if settings.max_time is not None else None
        self._key: RolloutKey | None = None
        self._begun: Counter[tuple[int, str]] = Counter()
        self._decided: dict[RolloutKey, Decision] = {}
        if self._train_call is not None:
            journal = RunDirectory(path=session.config.run_directory).journal
            self._decided = read_decisions(journal, session.rank, session.world_size)

    def begin(self) -> Decision | None:
        """Number the rollout that begins, and return what the deadline did to it in an earlier attempt."""
        if self._train_call is None:
            return None
        step = self._trainer.state.global_step
        mode = "train" if self._trainer.model.training else "eval"
        self._key = RolloutKey(self._train_call, step, mode, self._begun[step, mode])
        self._begun[step, mode] += 1
        return self._decided.pop(self._key, None)

    def ended(self, rollout: Rollout) -> None:
        """Report a rollout."""
        session, reasons = self._session, Counter(rollout.reasons)
        slot = session.slot
        for reason, count in reasons.items():
            name = f"ended_{reason.value}"
            setattr(slot, name, getattr(slot, name) + count)
        slot.publish()
        capped = {reason.value: count for reason, count in reasons.items() if reason in CAPPED}
        if capped:
            session.journal.write(
                "completions_capped",
                rank=session.rank,
                step=self._trainer.state.global_step,
                completions=len(rollout.reasons),
                decoding_steps=rollout.steps,
                **capped,
            )
        if rollout.timed_out_after is not None:
            self._timed_out()
        if self._key is not None:
            session.journal.write(
                EVENT,
                rank=session.rank,
                world_size=session.world_size,
                **self._key._asdict(),
                decoding_steps=rollout.steps,
                timed_out_after=rollout.timed_out_after,
            )
