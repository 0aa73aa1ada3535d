"""Reward workers at the points of a rank. Imports what runs workers only where they are used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from grpo_run.runtime.features.reward_workers.settings import RankRewards, RewardWorkerSettings
from grpo_run.runtime.launch.rank_settings import RankSettings
from grpo_run.runtime.rank.points import RankFeature, RolloutPoints
from grpo_run.runtime.rank.session import Session

if TYPE_CHECKING:
    from grpo_run.runtime.features.reward_workers._host import WorkerHost
    from grpo_run.runtime.features.reward_workers._served import ServedRewards


class RewardWorkersPart(RankFeature):
    """Reward workers at the points of a rank."""

    name = RewardWorkerSettings.NAME

    def __init__(self) -> None:
        self._told = RankRewards()
        self._host: WorkerHost | None = None
        self._served: ServedRewards | None = None

    def fork(self, settings: RankSettings) -> None:
        """Fork the host of the workers, if any may be used."""
        if (told := settings.features.get(self.name)) is None:
            return
        from grpo_run.runtime.features.reward_workers._host import start

        self._told = RankRewards.model_validate(told)
        self._host = start()

    def rollouts(self, trainer: Any, session: Session, train_call: int, points: RolloutPoints) -> None:
        """Let workers run the trainer's reward functions."""
        if self._host is None:
            return
        from grpo_run.runtime.features.reward_workers._served import ServedRewards

        if self._served is None:
            self._served = ServedRewards(session, self._host, self._told)
        self._served.begin_call(trainer, masked=points.facts.rows_can_leave)
        points.reward_functions.append(self._served.wrap)

    def end(self) -> None:
        """End the workers, if there are any."""
        if self._served is not None:
            self._served.close()


PART = RewardWorkersPart()
