"""Tools at the points of a rank: which calls are bounded, and where.

`_calls.py` does it in the rank; `_async.py` in the process that makes the rollouts of AsyncGRPO.
"""

from __future__ import annotations

from typing import Any

from grpo_run.runtime.features.agent_tools._async import BoundedLoop
from grpo_run.runtime.features.agent_tools._calls import AgentCalls
from grpo_run.runtime.features.agent_tools.settings import RankTools, ToolSettings
from grpo_run.runtime.history.run_directory import RunDirectory
from grpo_run.runtime.rank.points import CallPoints, RankFeature, RolloutPoints
from grpo_run.runtime.rank.session import Session
from grpo_run.runtime.upstream import async_grpo_names, trainer_names
from grpo_run.runtime.upstream.patches import override_attributes


class ToolsPart(RankFeature):
    """Tools at the points of a rank."""

    name = ToolSettings.NAME

    def call(self, session: Session, points: CallPoints) -> None:
        """Bound the calls of AsyncGRPO's agents, in the process that makes its rollouts."""
        known = async_grpo_names.agents_known(points.trainer)
        if known is False and session.settings.attempt == 0:
            session.warn(
                "how the rollout worker of this trainer calls tools is not known: they have no limit"
            )
        if not known:
            return
        worker, config = getattr(points.trainer, async_grpo_names.WORKER), session.config
        told = RankTools.model_validate(session.settings.features.get(self.name) or {})
        loop = BoundedLoop(
            loop=getattr(worker, async_grpo_names.LOOP_CLASS), settings=config.of(ToolSettings),
            deadlines=config.deadlines, told=told.model_copy(update={"moved": ()}), run_id=config.run_id,
            journal=RunDirectory(path=config.run_directory).journal, attempt=session.settings.attempt,
        )  # fmt: skip
        points.hooks.enter_context(override_attributes(worker, **{async_grpo_names.LOOP_CLASS: loop}))

    def rollouts(self, trainer: Any, session: Session, train_call: int, points: RolloutPoints) -> None:
        """Bound the calls of a trainer's agents; a trainer without them is left alone."""
        environments = getattr(trainer, trainer_names.FACTORIES, None)
        if not (points.facts.has_tools or environments):
            return
        told = RankTools.model_validate(session.settings.features.get(self.name) or {})
        calls = AgentCalls(trainer, session, told, masked=points.facts.rows_can_leave)
        if session.settings.attempt:
            session.notify("repeated steps are equal if tools and environments answer as before")
        settings = session.config.of(ToolSettings)
        points.agents.append(calls.replaced)
        points.agent_limit_seconds = settings.timeout_seconds
        points.inputs.append(calls.begin_rollout)
        if settings.timeout_seconds != 0 or settings.infrastructure_errors:
            points.leaving.append(calls.row_reasons)
        points.hooks.enter_context(calls.armed())


PART = ToolsPart()
