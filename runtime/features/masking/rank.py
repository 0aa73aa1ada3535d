"""Sample masking at the points of a rank. Imports nothing heavy: the script imports torch first."""

from __future__ import annotations

from typing import Any

from grpo_run.runtime.rank.points import RankFeature, RolloutPoints
from grpo_run.runtime.rank.session import Session
from grpo_run.runtime.upstream import features

MASKING = features.Feature(
    text="masking of samples without a valid reward, and replacing of prompts that fail",
    needs=features.LEAVING_ROWS.needs,
)


class MaskingPart(RankFeature):
    """Masks samples of trainers that leave out a row of rewards in which every column is NaN."""

    name = "masking"
    preloaded = (f"{__package__}._masking",)

    def needs(self, session: Session) -> tuple[features.Feature, ...]:
        """Return what masking needs, and with it all that lets rows leave."""
        return (MASKING,)

    def rollouts(self, trainer: Any, session: Session, train_call: int, points: RolloutPoints) -> None:
        """Choose samples once TRL has computed their rewards, and mask them once it has scored them."""
        if not (points.facts.has_rollouts and points.facts.rows_can_leave):
            return
        from grpo_run.runtime.features.masking._masking import SampleMasking

        masking = SampleMasking(trainer, session, train_call, points.row_reasons)
        points.scoring.append(masking.mask_samples)
        points.rewards.append(masking.choose_samples)


PART = MaskingPart()
