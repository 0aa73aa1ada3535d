"""One guarded `train()` call: resume, hook the trainer, train, record the end, remove the hooks.

Called by the wrapper that `attach.py` puts on `Trainer.train`. Every hook is a context manager on one
`ExitStack`, so a call that raises leaves the trainer as it was. Methods of the trainer are wrapped, never
copied.

`record_model_activity` counts forward passes with torch's public hooks, which shows the watchdog progress
inside long phases such as generation, and logs DDP's backward as one collective. A compiled model gets no
hook, because a hook would break its graph. `order_warning` warns of data that is not shuffled: ranks
take fixed parts of each batch, so with sorted data one rank always has the longest completions and all
others wait for it. Changes no value.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from transformers import TrainerCallback

from grpo_run.runtime.launch import rehearsal
from grpo_run.runtime.rank.exact.state import ExactState
from grpo_run.runtime.rank.hooks._callback import GuardCallback
from grpo_run.runtime.rank.hooks._control import ControlVote
from grpo_run.runtime.rank.hooks._phases import mark_callbacks
from grpo_run.runtime.rank.hooks._resume import RestoredCall
from grpo_run.runtime.rank.hooks._rollout_hooks import rollouts_hooked
from grpo_run.runtime.rank.memory_facts import publish_facts
from grpo_run.runtime.rank.points import CallPoints
from grpo_run.runtime.rank.resuming.identification import settings_digest
from grpo_run.runtime.rank.resuming.renamed_weights import restore_renamed_weights
from grpo_run.runtime.rank.saving.saver import Saver
from grpo_run.runtime.rank.saving.trainer_contents import TrainerContents, save_through
from grpo_run.runtime.rank.session import Session
from grpo_run.runtime.rank.step.events import StepEvents, finish, leave
from grpo_run.runtime.rank.step.guard import AttemptState
from grpo_run.runtime.rank.step.resume import CallFacts, agree_on_resume, held_snapshot, resumed_directory
from grpo_run.runtime.rank.step.step_vote import StepVote
from grpo_run.runtime.rank.trainer_facts import TrainerFacts
from grpo_run.runtime.upstream import input_gradients, tensor_files, trainer_names
from grpo_run.runtime.upstream.patches import wrapped_methods


@contextmanager
def record_model_activity(
    trainer: Any, session: Session, passes: Sequence[Callable[[Mapping[str, Any]], None]] = ()
) -> Iterator[None]:
    """Count the model's forward passes and log its backward passes for the length of the block.

    Args:
        passes: called before each forward pass with its keyword arguments.
    """
    slot, accelerator, model = session.slot, trainer.accelerator, trainer.model
    handle = None
    if getattr(model, "_compiled_call_impl", None) is None and not trainer.args.torch_compile:

        def record(module: Any, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            slot.record_pass()
            for one in passes:
                one(keywords)

        handle = model.register_forward_pre_hook(record, with_kwargs=True)

    def logged_backward(backward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not accelerator.sync_gradients:
            return backward(*args, **kwargs)
        with session.recorder.backward(trainer.model_wrapped):
            return backward(*args, **kwargs)

    try:
        with wrapped_methods(accelerator, {"backward": [logged_backward]}):
            yield
    finally:
        if handle is not None:
            handle.remove()


HOOK_REPLACED = (
    "transformers adds a forward hook to the input embeddings each time that gradient checkpointing is"
    " enabled, and TRL enables it after each rollout. The hook of the last time was removed first, and will"
    " be from here on; otherwise forward passes would get slower with every step."
)


def order_warning(trainer: Any, facts: TrainerFacts) -> str | None:
    """Return a warning if a trainer that generates reads its data in the order that the script has given.

    SFT has a setting `shuffle_dataset`, too: it shuffles once in advance, and its sampler is random anyway.
    """
    if not facts.generates or getattr(trainer.args, "shuffle_dataset", None) is not False:
        return None
    return (
        "shuffle_dataset=False: each rank takes a fixed part of every batch, so one rank may always have the"
        " longest completions while the others wait; shuffle the data set unless its order matters"
    )


def run_train_call(
    guard: AttemptState,
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
        AlarmRaised: all ranks agreed to end the attempt.
    """
    session = guard.session
    if rehearsal.current() is not None:
        script_argument = None  # a checkpoint of the run that is rehearsed
    trainer.args.output_dir = guard.output_directory(str(trainer.args.output_dir))
    call = guard.begin_call(type(trainer).__qualname__, trainer.args.output_dir)
    facts = TrainerFacts.of(trainer, session.world_size)
    publish_facts(trainer, facts, session)
    fitting = CallFacts(
        batch=facts.batch,
        parameters=facts.shapes if session.is_main else (),
        settings=settings_digest(trainer) if session.is_main else "",
    )
    agreed = agree_on_resume(guard, call, script_argument or None, fitting)
    call, resume = agreed.call, agreed.choice
    if (text := order_warning(trainer, facts)) is not None and session.world_size > 1:
        session.warn(text)
    with ExitStack() as hooks:
        points = CallPoints(
            train_call=call.ordinal, trainer=trainer, facts=facts, models=[trainer.model], hooks=hooks
        )
        step_vote = StepVote(session, guard.requests, points)
        exact = ExactState(
            trainer, rank=session.rank, world_size=session.world_size, warn=session.warn, features=points
        )
        exact.script_decides_anew = resume.decides_anew
        hooks.callback(exact.close)
        for feature in guard.features:
            feature.call(session, points)
        points.read_steps()
        hooks.enter_context(rollouts_hooked(trainer, facts, guard, call.ordinal, step_vote))
        hooks.enter_context(record_model_activity(trainer, session, points.forward_passes))
        warn_once = functools.cache(session.warn_in_journal if session.is_main else lambda text: None)
        hooks.enter_context(input_gradients.one_hook_per_model(lambda: warn_once(HOOK_REPLACED)))
        contents = TrainerContents(trainer, facts, session, call, exact)
        saver = Saver(contents, session, snapshots=guard.snapshots, collect_vote=step_vote.collect)
        events = StepEvents(session, call.ordinal, step_vote, saver, points, exact.begin_step)
        control = ControlVote(trainer, session, step_vote.collect)
        hooks.enter_context(control.observed())
        hooks.enter_context(wrapped_methods(trainer, {trainer_names.AFTER_STEP: [control.settle]}))
        hooks.enter_context(save_through(saver, trainer, contents, events.checkpoint))
        marks = mark_callbacks(trainer.callback_handler, TrainerCallback, session.slot, control.note)
        hooks.enter_context(marks)
        resumed_from = resumed_directory(resume.argument, call)
        restored = None
        if resumed_from is not None:
            tensor_files.accept_numbered_cpus()
            restored = RestoredCall(
                trainer,
                session,
                exact,
                folder=resumed_from,
                # the script may ask for more steps than the call of another run took
                finished=resume.finished and not resume.foreign,
                ignore_keys=kwargs.get("ignore_keys_for_eval"),
            )
            hooks.enter_context(restored.ended())
            hooks.enter_context(restore_renamed_weights(trainer, session.warn))
        loading = hooks.enter_context(ExitStack())
        loading.enter_context(held_snapshot(guard, resume))
        callback = GuardCallback(
            session,
            call.ordinal,
            events,
            control,
            saver,
            exact,
            facts,
            restored=restored,
            record=agreed.record,
            loaded=loading.close,
        )
        trainer.add_callback(callback)
        hooks.callback(trainer.remove_callback, callback)
        result = original(trainer, resume.argument, None, *args, **kwargs)
        if not resume.finished or resume.foreign:
            finish(session, call, saver, trainer.state.global_step)
    leave(session)
    return result


def run_inner_call(
    guard: AttemptState,
    trainer: Any,
    original: Callable[..., Any],
    script_argument: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run a `train()` call that a callback or a reward of another call makes, as transformers would.

    It is a part of the outer call's step, so it has no steps, votes or checkpoints of its own. A number of
    its own would not identify it: a resumed run makes only the inner calls of the steps that are left.
    """
    guard.warn_of_inner_call(trainer)
    with record_model_activity(trainer, guard.session):
        return original(trainer, script_argument, None, *args, **kwargs)
