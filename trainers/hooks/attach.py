"""Puts the guard on every `transformers.Trainer` of an unmodified script.

Installed by the bootstrap: once `transformers.trainer` is (or gets) imported, `Trainer.train` is wrapped, so TRL's
trainers and users' subclasses are guarded at their `train()` call. Around a call the guard resumes from the
newest complete checkpoint, marks phases, votes, publishes checkpoints and, after an agreed stop, leaves the script.
Bodies of TRL's methods are never copied; methods are wrapped as they come.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import wrapt

from grpo_run.runtime.checkpoints import manifest, publishing
from grpo_run.runtime.checkpoints.manifest import TrainCall
from grpo_run.runtime.errors import CheckpointError, ConfigError, Stopped
from grpo_run.runtime.staging.slots import RESTORE
from grpo_run.trainers import upstream
from grpo_run.trainers.hooks import caps, phases, progress
from grpo_run.trainers.rank.session import Session, current
from grpo_run.trainers.resuming.agreement import agree
from grpo_run.trainers.resuming.request import ResumeChoice, ResumeRequest
from grpo_run.trainers.saving import description
from grpo_run.watchdog.observation import Phase, RankState

if TYPE_CHECKING:
    from grpo_run.trainers.saving.saver import Saver

_GUARDED = "_grpo_run_guard"
_WRAPPED = (
    *upstream.ROLLOUT_METHODS,
    upstream.SAVE_CHECKPOINT,
    upstream.AFTER_STEP,
    "evaluate",
    "training_step",
)


def install(session: Session) -> None:
    """Hook `Trainer.train` and, with caps, TRL's configurations: now, or when they are imported."""
    wrapt.register_post_import_hook(_patch_trainer, "transformers.trainer")
    if session.config.generation:

        def journal(**fields: Any) -> None:
            if session.is_main:
                session.journal.write("generation_capped", rank=0, **fields)

        def cap(name: str, loaded: Any) -> None:
            caps.install(getattr(loaded, name), session.config.generation, journal)

        for module, name in (("grpo_config", "GRPOConfig"), ("rloo_config", "RLOOConfig")):
            wrapt.register_post_import_hook(functools.partial(cap, name), f"trl.trainer.{module}")


def _patch_trainer(module: Any) -> None:
    original = module.Trainer.train
    if getattr(original, _GUARDED, False):
        return

    @functools.wraps(original)
    def train(
        self: Any, resume_from_checkpoint: Any = None, trial: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        session = current()
        if session is None or trial is not None:
            return original(self, resume_from_checkpoint, trial, *args, **kwargs)
        return _guarded_train(session, self, original, resume_from_checkpoint, args, kwargs)

    setattr(train, _GUARDED, True)
    module.Trainer.train = train


def guard(trainer: Any) -> Any:
    """Check a trainer now rather than at its `train()` call; see `grpo_run.trainers.guard`."""
    session = current()
    if session is not None:
        _check(session, trainer)
    return trainer


def _check(session: Session, trainer: Any) -> None:
    caps.check(trainer, session.config.generation)
    expected = session.config.expected_distributed_type
    if expected is not None:
        from grpo_run.runtime.launch.accelerate import check_took_effect

        check_took_effect(expected, trainer.accelerator, world_size=session.world_size)
    missing = [name for name in upstream.TRAINER_METHODS if not hasattr(trainer, name)]
    if missing and not session.config.allow_untested:
        raise ConfigError(
            f"{type(trainer).__name__} lacks {', '.join(missing)}: not a Trainer this release can guard"
        )


def _guarded_train(
    session: Session,
    trainer: Any,
    original: Any,
    script_asks: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    from transformers import TrainerCallback

    from grpo_run.trainers.exact.state import ExactState

    # these import torch, which the script may want to be first to do
    from grpo_run.trainers.hooks.callback import GuardCallback
    from grpo_run.trainers.saving.saver import Saver

    _check(session, trainer)
    session.train_calls += 1
    call = TrainCall(
        ordinal=session.train_calls,
        trainer_class=type(trainer).__qualname__,
        output_dir=str(trainer.args.output_dir),
    )
    _warn_of_shared_directory(session, call)
    resume = _agree_on_resume(session, call, script_asks or None, trainer)
    path = phases.Path()
    exact = ExactState(trainer, rank=session.rank, world_size=session.world_size, warn=session.warn)
    callback = GuardCallback(
        session,
        call.ordinal,
        path,
        restoring=resume.finished and not resume.foreign,
        exact=exact,
        resumed_from=_resumed_from(resume.argument, call),
    )
    own = {name: trainer.__dict__[name] for name in _WRAPPED if name in trainer.__dict__}
    if session.injector is not None:
        session.injector.prepare(session.votes.maximum)
        session.injector.attach(trainer)
    _mark_phases(trainer, session, callback, path)
    undo_progress = progress.show_work(trainer, session)
    saver = Saver(trainer, session, call, callback.collect, exact)
    saver.wrap(callback.snapshot_due, callback.snapshot_taken)
    undo_callbacks = phases.wrap_callbacks(trainer.callback_handler, TrainerCallback, session.slot)
    trainer.add_callback(callback)
    undo_restore = _restore_only(trainer, only_at_end=resume.foreign) if resume.finished else None
    try:
        result = original(trainer, resume.argument, None, *args, **kwargs)
        if callback.stopping and trainer.state.global_step < trainer.state.max_steps:
            raise Stopped(trainer.state.global_step)
        if not resume.finished or resume.foreign:
            _finish(session, trainer, call, saver)
    finally:
        trainer.remove_callback(callback)
        exact.close()
        undo_progress()
        undo_callbacks()
        if undo_restore is not None:
            undo_restore()
        _unwrap(trainer, own)
    session.slot.state = RankState.between
    session.slot.replace(Phase.idle)
    session.slot.touch()
    return result


def _resumed_from(argument: str | bool | None, call: TrainCall) -> Path | None:
    """The checkpoint directory that `train()` will load, as transformers finds it."""
    if isinstance(argument, str):
        return Path(argument)
    if not argument:
        return None
    from transformers.trainer_utils import get_last_checkpoint

    newest = get_last_checkpoint(call.output_dir)
    return Path(newest) if newest else None


def _warn_of_shared_directory(session: Session, call: TrainCall) -> None:
    """Warn when an earlier call of this script wrote its checkpoints to the same place, under the same numbers."""
    place = os.path.realpath(call.output_dir)
    if place in session.output_dirs:
        session.warn(
            f"{call.output_dir} was used by an earlier train() call: both number their checkpoints from 0, so a"
            " recovery may have to train the earlier call again; give each call an output_dir of its own"
        )
    session.output_dirs.add(place)


def _agree_on_resume(
    session: Session, call: TrainCall, script_asks: Any, trainer: Any = None
) -> ResumeChoice:
    """Rank 0 chooses, all ranks take the same; a stop asked for before the call is obeyed here."""
    session.votes.collect()  # left under way when the script caught what ended its last train() call
    stop = session.votes.maximum(int(session.board.requests[0]))
    if stop:
        raise Stopped(session.slot.step)
    config, settings = session.config, session.settings
    request = ResumeRequest(
        call=call,
        run_id=config.run_id,
        world_size=session.world_size,
        first_attempt=settings.first_attempt,
        run_started_at=settings.run_started_at,
        script_argument=script_asks,
        resume_from=config.resume_from,
        batch=description.batch(trainer, session.world_size),
        parameters=description.named_shapes(trainer) if session.is_main else (),
        also_search=(config.snapshot_directory / RESTORE,) if config.snapshot_directory is not None else (),
    )
    if session.is_main:
        publishing.clean_partials(Path(call.output_dir))  # what died between two renames has its name again
    choice = agree(session, request)
    if choice.notice:
        session.warn(choice.notice)
    if choice.checkpoint is not None:
        what = "restored, it had finished" if choice.finished else "goes on"
        session.say(
            f"train() call {call.ordinal} ({call.trainer_class}) {what} from {choice.checkpoint.path}"
        )
        if choice.finished and session.is_main:
            session.journal.write(
                "train_restored", rank=0, step=choice.checkpoint.manifest.step, train_call=call.ordinal
            )
    return choice


def _mark_phases(trainer: Any, session: Session, callback: Any, path: phases.Path) -> None:
    slot = session.slot
    wrap = functools.partial(phases.wrap_method, trainer, slot=slot, path=path)
    wrap(upstream.GENERATE_AND_SCORE, Phase.score)
    wrap(upstream.GENERATE, Phase.generate)
    wrap(upstream.CALCULATE_REWARDS, Phase.reward)
    wrap("evaluate", Phase.eval)
    training_step = trainer.training_step

    @functools.wraps(training_step)
    def step(*args: Any, **kwargs: Any) -> Any:
        loss = training_step(*args, **kwargs)
        # transformers itself reads this value next, so looking at it costs no synchronisation of its own
        if hasattr(loss, "isfinite") and not bool(loss.isfinite().all()):
            callback.nonfinite = True
        return loss

    trainer.training_step = step
    functions = getattr(trainer, "reward_funcs", None)
    if isinstance(functions, list):
        functions[:] = [
            phases.wrap_reward(function, slot, counts_tokens=index == 0)
            for index, function in enumerate(functions)
        ]


def _unwrap(trainer: Any, own: dict[str, Any]) -> None:
    """Take the wrappers off, so that a second `train()` call wraps afresh, and give back what the script had set."""
    for name in _WRAPPED:
        trainer.__dict__.pop(name, None)
    trainer.__dict__.update(own)


def _restore_only(trainer: Any, *, only_at_end: bool = False) -> Any:
    """Let `train()` load the finished call's state and end, without taking a step.

    Args:
        only_at_end: train on when the script now asks for more steps than the call had taken.
    """
    run_epoch = getattr(trainer, upstream.RUN_EPOCH)

    def no_epoch(*args: Any, **kwargs: Any) -> Any:
        if only_at_end and trainer.state.global_step < trainer.state.max_steps:
            return run_epoch(*args, **kwargs)
        trainer.control.should_training_stop = True
        return None

    setattr(trainer, upstream.RUN_EPOCH, no_epoch)
    return lambda: trainer.__dict__.pop(upstream.RUN_EPOCH, None)


def _finish(session: Session, trainer: Any, call: TrainCall, saver: Saver) -> None:
    """Record that the call ran to its end, beside the checkpoint that holds its end."""
    path = saver.finish()
    if session.is_main:
        if path is not None:
            try:
                manifest.mark_finished(path)
            except (OSError, CheckpointError) as error:
                session.warn(f"{path} is not marked as the end of its train() call: {error}")
        session.journal.write("train_ended", rank=0, step=trainer.state.global_step, train_call=call.ordinal)
    session.votes.maximum(0)
