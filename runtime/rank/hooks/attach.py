"""Attaches the guard to every `transformers.Trainer` of an unmodified script.

The bootstrap calls `install_guard` before the script runs. When the script imports `transformers.trainer`,
`Trainer.train` is wrapped on the class, so TRL's trainers and the user's own subclasses are guarded when
`train()` is called. `train_call.py` runs the guarded call. This module imports neither torch nor
transformers: the script's own import order is preserved.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Any

import wrapt

from grpo_run.runtime.call_names import LOOP
from grpo_run.runtime.errors import ConfigError
from grpo_run.runtime.history.events import ModelSaved
from grpo_run.runtime.rank.hooks._fewer_hosts import keep_batch
from grpo_run.runtime.rank.hooks._no_trainer import watch_optimizer_steps
from grpo_run.runtime.rank.points import RankFeature
from grpo_run.runtime.rank.session import Session, current
from grpo_run.runtime.rank.step.guard import AttemptState, guard_of
from grpo_run.runtime.upstream import trainer_names
from grpo_run.runtime.upstream.features import EXACT_LOG, EXACT_ROLLOUT, TOOLS, Feature, lacking, off_text

_GUARDED = "_grpo_run_guard"


def install_guard(session: Session, features: Sequence[RankFeature] = ()) -> None:
    """Register import hooks that wrap `Trainer.train` and constructors of trainers, and let features prepare.

    A script that trains by itself is watched, too.

    Args:
        features: take part in the calls of this rank.
    """
    guard = guard_of(session)
    guard.features = tuple(features)
    for feature in guard.features:
        feature.script_begins(session)
    watch = functools.partial(
        watch_optimizer_steps, session=session, guarded=lambda: guard.running is not None
    )
    wrapt.register_post_import_hook(watch, "torch.optim.optimizer")
    wrapt.register_post_import_hook(functools.partial(wrap_train, guard=guard), "transformers.trainer")


def wrap_train(module: Any, guard: AttemptState) -> None:
    """Wrap `Trainer.train` of the `transformers.trainer` module. A second call has no effect."""
    original = module.Trainer.train
    if getattr(original, _GUARDED, False):
        return

    @functools.wraps(original)
    def train(
        self: Any, resume_from_checkpoint: Any = None, trial: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        # a hyperparameter search restarts training itself; a process forked from the rank is not the rank
        if trial is not None or not guard.session.is_rank:
            return original(self, resume_from_checkpoint, trial, *args, **kwargs)
        # imports torch, which only the script may import first
        from grpo_run.runtime.rank.hooks.train_call import run_inner_call, run_train_call

        if guard.running == LOOP:
            raise ConfigError(
                f"{type(self).__name__}.train() is called inside a loop of grpo_run.trainers.loop: call it"
                " before or after the loop; a loop over `while` ends with `run.end()`"
            )
        if guard.running:
            return run_inner_call(guard, self, original, resume_from_checkpoint, args, kwargs)
        check_trainer(guard.session, self, guard.features)
        guard.running = type(self).__qualname__
        try:
            return run_train_call(guard, self, original, resume_from_checkpoint, args, kwargs)
        finally:
            guard.running = None

    setattr(train, _GUARDED, True)
    module.Trainer.train = train
    _watch_saved_models(module.Trainer, guard.session)


def _watch_saved_models(trainer_class: Any, session: Session) -> None:
    """Journal where the script saves its model by `save_model`: the end of the run says so."""
    original = trainer_class.save_model

    @functools.wraps(original)
    def save_model(self: Any, output_dir: str | None = None, *args: Any, **kwargs: Any) -> Any:
        returned = original(self, output_dir, *args, **kwargs)
        internal = args[0] if args else kwargs.get(trainer_names.INTERNAL_SAVE, False)
        if session.is_rank and session.is_main and not internal:
            session.journal.write(
                ModelSaved(
                    rank=0,
                    step=int(self.state.global_step),
                    path=os.path.abspath(output_dir or self.args.output_dir),
                )
            )
        return returned

    trainer_class.save_model = save_model


def guard(trainer: Any) -> Any:
    """Check a trainer now instead of at its `train()` call; see `grpo_run.trainers.guard`."""
    session = current()
    if session is not None:
        check_trainer(session, trainer, guard_of(session).features)
    return trainer


def check_trainer(session: Session, trainer: Any, features: Sequence[RankFeature] = ()) -> None:
    """Check that the trainer can be guarded and that the run's settings reached it.

    Raises:
        ConfigError: a setting of a feature or the expected parallelism did not take effect, or the trainer
            lacks a method that the guard wraps.
    """
    for feature in features:
        feature.check_trainer(session, trainer)
    keep_batch(session, trainer)
    expected = session.config.expected_distributed_type
    if expected is not None:
        # only runs with such a setting need it, and every rank imports this module
        from grpo_run.runtime.launch.accelerate import check_took_effect

        check_took_effect(expected, trainer.accelerator, world_size=session.world_size)
    missing = [name for name in trainer_names.TRAINER_METHODS if not hasattr(trainer, name)]
    if missing:
        raise ConfigError(
            f"{type(trainer).__name__} lacks {', '.join(missing)}: not a Trainer this release can guard"
        )
    _warn_of_features(session, trainer, [need for feature in features for need in feature.needs(session)])


def _warn_of_features(session: Session, trainer: Any, needed: Sequence[Feature]) -> None:
    """Name each feature that would act on this trainer, and is off because the release lacks a name."""
    warn = session.warn if session.settings.attempt == 0 else session.warn_in_journal
    concerned = [EXACT_LOG, EXACT_ROLLOUT, *needed]
    if getattr(trainer, "tools", None):
        concerned.append(TOOLS)
    for feature in concerned:
        if missing := list(lacking(feature, trainer)):
            warn(off_text(feature, missing))
