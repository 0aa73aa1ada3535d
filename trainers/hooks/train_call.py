"""One guarded `train()` call: resume, hook the trainer, train, record the end, remove the hooks.

Called by the wrapper that `attach.py` puts on `Trainer.train`. Every hook is a context manager on one
`ExitStack`, so a call that raises leaves the trainer as it was. Methods of the trainer are wrapped, never
copied.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from transformers import TrainerCallback

from grpo_run.trainers.calls.guard import Guard
from grpo_run.trainers.calls.resume import agree_on_resume, resumed_directory, serve_snapshot
from grpo_run.trainers.calls.step_vote import StepVote
from grpo_run.trainers.calls.steps import finish, leave
from grpo_run.trainers.exact.state import ExactState
from grpo_run.trainers.forecast.rollouts import prepare
from grpo_run.trainers.hooks import data_order
from grpo_run.trainers.hooks.callback import GuardCallback
from grpo_run.trainers.hooks.model_activity import record_model_activity
from grpo_run.trainers.hooks.phases import mark_callbacks
from grpo_run.trainers.hooks.resume import RestoredCall, facts_of, skip_training
from grpo_run.trainers.hooks.rollout_hooks import rollouts_hooked
from grpo_run.trainers.hooks.rollouts import capped_rollouts
from grpo_run.trainers.learning.guards import LearningGuards
from grpo_run.trainers.learning.step_values import StepReader, read_steps
from grpo_run.trainers.loading.renamed_weights import restore_renamed_weights
from grpo_run.trainers.memory_plan.facts import publish_facts
from grpo_run.trainers.resuming import started_over
from grpo_run.trainers.saving import description
from grpo_run.trainers.saving.saver import Saver
from grpo_run.trainers.saving.trainer_contents import TrainerContents, save_through


def run_train_call(
    guard: Guard,
    trainer: Any,
    original: Callable[..., Any],
    script_argument: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run `original` (`Trainer.train`) guarded, and return its result. Collective.

    Args:
        script_argument: the script's `resume_from_checkpoint` argument.
        args, kwargs: the remaining arguments of the script's `train()` call.

    Raises:
        Stopped: all ranks agreed to stop before the call's last step.
        GuardTripped: all ranks agreed that a learning guard ends the attempt.
    """
    session = guard.session
    chosen = str(trainer.args.output_dir)
    script_argument = started_over.script_argument(session.config, chosen, script_argument)
    trainer.args.output_dir = started_over.output_directory(session.config, chosen)
    call = guard.begin_call(type(trainer).__qualname__, trainer.args.output_dir)
    publish_facts(trainer, session, call.ordinal, layout=description.layout(trainer))
    facts = facts_of(trainer, session)
    agreed = agree_on_resume(session, call, script_argument or None, facts, claimed=guard.claimed)
    call, resume = guard.recognize(call, agreed.choice.ordinal), agreed.choice
    guards = LearningGuards(session, call.ordinal, sampling_group=sampling_group(trainer, session.rank))
    step_vote = StepVote(session, guard.requests, guards)
    reader = StepReader(trainer)
    forecasts = prepare(trainer, session, call.ordinal)
    order = data_order.data_order(trainer)
    if (text := data_order.warning(order)) is not None and session.world_size > 1:
        session.warn(text)
    with ExitStack() as hooks:
        exact = ExactState(
            trainer, rank=session.rank, world_size=session.world_size, warn=session.warn, guards=guards
        )
        hooks.callback(exact.close)
        if session.injector is not None:
            session.injector.prepare(session.votes.maximum)
            hooks.enter_context(session.injector.attached(trainer))
        hooks.enter_context(rollouts_hooked(trainer, session, call.ordinal, step_vote, forecasts))
        hooks.enter_context(read_steps(trainer, reader))
        hooks.enter_context(record_model_activity(trainer, session))
        contents = TrainerContents(trainer, session, call, exact)
        saver = Saver(contents, session, snapshots=guard.snapshots, collect_vote=step_vote.collect)
        hooks.enter_context(save_through(saver, trainer, contents))
        hooks.enter_context(mark_callbacks(trainer.callback_handler, TrainerCallback, session.slot))
        resumed_from = resumed_directory(resume.argument, call)
        restored = None
        if resumed_from is not None:
            restored = RestoredCall(trainer, session, exact, kwargs.get("ignore_keys_for_eval"))
            hooks.enter_context(restored.ended())
            hooks.enter_context(restore_renamed_weights(trainer, session.warn))
        loading = hooks.enter_context(ExitStack())
        loading.enter_context(serve_snapshot(guard, resume))
        callback = GuardCallback(
            session,
            call.ordinal,
            step_vote,
            saver,
            exact,
            guards,
            reader,
            restoring=resume.finished and not resume.foreign,
            resumed_from=resumed_from,
            restored=restored,
            record={**agreed.record, "data_order": str(order)},
            loaded=loading.close,
        )
        trainer.add_callback(callback)
        hooks.callback(trainer.remove_callback, callback)
        if resume.finished:
            hooks.enter_context(skip_training(trainer, only_at_end=resume.foreign))
        result = original(trainer, resume.argument, None, *args, **kwargs)
        if not resume.finished or resume.foreign:
            finish(session, call, saver, trainer.state.global_step)
    leave(session)
    return result


def sampling_group(trainer: Any, rank: int) -> int:
    """Return what ranks have in common that must draw the same random numbers: those of one vLLM engine, else one rank."""
    args = trainer.args
    shared = getattr(args, "use_vllm", False) and getattr(args, "vllm_mode", "") == "colocate"
    return rank // int(getattr(args, "vllm_tensor_parallel_size", 1) or 1) if shared else rank


def run_inner_call(
    guard: Guard,
    trainer: Any,
    original: Callable[..., Any],
    script_argument: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run a `train()` call that a callback or a reward of another call makes, as transformers would.

    It is a part of the outer call's step, so it has no steps, votes or checkpoints of its own. A number of its own
    would not identify it: a resumed run makes only the inner calls of the steps that are left.
    """
    guard.warn_of_inner_call(trainer)
    with record_model_activity(trainer, guard.session), capped_rollouts(trainer, guard.session, None):
        return original(trainer, script_argument, None, *args, **kwargs)
