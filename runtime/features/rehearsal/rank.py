"""The rehearsal at the points of a rank: write elsewhere, take few steps, note what runs are compared by.

Acts only in a launch of `grpo-run rehearse`. Trackers and uploads of a Trainer are switched off. The script
itself is not changed, and what it writes by itself is found by the rehearsal afterwards.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import wrapt

from grpo_run.runtime.launch.rehearsal import Rehearsal, current
from grpo_run.runtime.rank.points import AgentCall, CallPoints, RankFeature, RolloutPoints
from grpo_run.runtime.rank.session import Session
from grpo_run.runtime.rank.tensor_digests import digest_of_weights
from grpo_run.runtime.upstream import trainer_names
from grpo_run.runtime.upstream.async_functions import is_coroutine_function
from grpo_run.runtime.upstream.tracker_names import leave_out_trackers


class RehearsalPart(RankFeature):
    """The rehearsal in one rank."""

    name = "rehearsal"

    def script_begins(self, session: Session) -> None:
        """Let training arguments name a directory of the rehearsal from the beginning: a Trainer creates its
        own when it is made."""
        if (rehearsal := current()) is not None:
            watch = functools.partial(_redirect_arguments, rehearsal)
            wrapt.register_post_import_hook(watch, "transformers.training_args")

    def check_trainer(self, session: Session, trainer: Any) -> None:
        """Shorten the call that follows."""
        if (rehearsal := current()) is not None:
            _shorten(rehearsal, trainer)

    def rollouts(self, trainer: Any, session: Session, train_call: int, points: RolloutPoints) -> None:
        """Note prompts and rewards, and whether there are tools; let a call of one never return."""
        if (rehearsal := current()) is None:
            return
        from grpo_run.runtime.features.rehearsal._traces import Traces, digest_of_values

        traces = Traces(rehearsal.traces, session.rank)

        def step() -> int:
            return int(trainer.state.global_step) + 1

        def prompts(original: Callable[..., Any], rows: Any, *args: Any, **kwargs: Any) -> Any:
            traces.write(train_call, step(), "prompts", digest_of_values(rows))
            return original(rows, *args, **kwargs)

        def note(name: str, args: Any, kwargs: Any, got: Any) -> Any:
            values = [None if value is None else float(value) for value in got]
            traces.write(train_call, step(), f"reward {name}", digest_of_values([args, kwargs]), values)
            return got

        def reward(function: Any, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
            if is_coroutine_function(function):

                async def noted_async(*args: Any, **kwargs: Any) -> Any:
                    return note(name, args, kwargs, await call(*args, **kwargs))

                return noted_async
            return lambda *args, **kwargs: note(name, args, kwargs, call(*args, **kwargs))

        points.inputs.append(prompts)
        points.reward_functions.append(reward)
        if points.agents:  # of what bounds the calls, which comes before this feature
            rehearsal.note("tools", {"timeout_seconds": points.agent_limit_seconds})
        if not points.agents or not rehearsal.tool_hangs:
            return
        begin, bounded = rehearsal.span(trainer.args).rollout_step, points.agents[-1]
        first = {"tool": begin, "step": begin, "reset": begin + 1}  # each reset comes before the tools

        def replaced(call: AgentCall) -> Callable[..., Any]:
            @wrapt.decorator
            def hanging(function: Any, instance: Any, args: Any, kwargs: Any) -> Any:
                if call.kind not in first or step() < first[call.kind] or not rehearsal.first("hung"):
                    return function(*args, **kwargs)
                return (asyncio if is_coroutine_function(function) else threading).Event().wait()

            return bounded(replace(call, function=hanging(call.function)))

        points.agents.append(replaced)

    def call(self, session: Session, points: CallPoints) -> None:
        """Note the weights before the first step and after each step that could be the last, and batches."""
        if (rehearsal := current()) is None:
            return
        from grpo_run.runtime.features.rehearsal._traces import Traces, digest_of_values

        traces, models = Traces(rehearsal.traces, session.rank), list(points.models)
        span = rehearsal.span(getattr(points.trainer, "args", None))
        seen = {0}

        def end_step(step: int) -> None:
            seen.add(step)
            if step == span.steps:
                traces.write(points.train_call, step, "weights", digest_of_weights(models))

        def batch(given: Any) -> None:
            step = max(seen) + 1
            if -step not in seen and models[0].training:  # the first batch of a step
                seen.add(-step)
                tensors = {name: value for name, value in given.items() if hasattr(value, "tolist")}
                traces.write(points.train_call, step, "batch", digest_of_values(tensors))

        if session.settings.first_attempt:
            traces.write(points.train_call, 0, "weights", digest_of_weights(models))
        points.step_ends.append(end_step)
        if points.facts is not None and not points.facts.generates:
            points.forward_passes.append(batch)


def _redirect_arguments(rehearsal: Rehearsal, module: Any) -> None:
    original = module.TrainingArguments.__post_init__

    @functools.wraps(original)
    def redirected(self: Any, *args: Any, **kwargs: Any) -> None:
        if self.output_dir is not None:
            self.output_dir = rehearsal.redirected(self.output_dir)
        original(self, *args, **kwargs)

    module.TrainingArguments.__post_init__ = redirected


def _shorten(rehearsal: Rehearsal, trainer: Any) -> None:
    """Let a trainer take few steps, save in between, and reach neither trackers nor the hub."""
    args = trainer.args
    span = rehearsal.span(args)
    rehearsal.note("span", vars(span))
    strategy = str(getattr(args.save_strategy, "value", args.save_strategy))
    saving = {"save_steps": float(args.save_steps), "max_steps": int(args.max_steps)}
    rehearsal.note("saving", {**saving, "limit": args.save_total_limit})
    args.max_steps = span.steps
    if strategy != "no":
        args.save_strategy, args.save_steps = type(args.save_strategy)("steps"), span.save_every
    if getattr(args.eval_strategy, "value", args.eval_strategy) != "no":
        args.eval_strategy, args.eval_steps = type(args.eval_strategy)("steps"), span.save_every
    leave_out_trackers(trainer)
    trainer.push_to_hub = lambda *given, **named: None
    original = trainer.save_model

    @functools.wraps(original)
    def save_model(output_dir: str | None = None, *given: Any, **named: Any) -> Any:
        internal = given[0] if given else named.get(trainer_names.INTERNAL_SAVE, False)
        if output_dir is not None and not internal:
            output_dir = rehearsal.redirected(output_dir)
        return original(output_dir, *given, **named)

    trainer.save_model = save_model


PART = RehearsalPart()
