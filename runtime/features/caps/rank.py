"""Caps at the points of a rank. Imports nothing heavy: the script imports torch first."""

from __future__ import annotations

import functools
from typing import Any

import wrapt

from grpo_run.runtime.event import Event
from grpo_run.runtime.features.caps._backends import CAPS
from grpo_run.runtime.features.caps._configuration import check, install, settings_of
from grpo_run.runtime.features.caps.settings import OWN, CapsSettings
from grpo_run.runtime.rank.points import CallPoints, RankFeature, RolloutPoints
from grpo_run.runtime.rank.session import Session
from grpo_run.runtime.upstream.features import Feature
from grpo_run.runtime.upstream.trainer_kinds import ROLLOUTS, TRAINERS


class CapsPart(RankFeature):
    """The caps of the command line, and those that a script has applied to a trainer."""

    name = CapsSettings.NAME
    preloaded = (f"{__package__}._capping", f"{__package__}._loop", f"{__package__}._reports")

    def script_begins(self, session: Session) -> None:
        """Cap the configurations that the script will build, before TRL validates them."""
        caps = session.config.of(CapsSettings).generation
        if OWN.keys() & caps:
            # before a script can keep the method in a function of its own
            wrapt.register_post_import_hook(_wrap_generate, "transformers.generation.utils")

        def journal(event: Event) -> None:
            if session.is_main:
                session.journal.write(event)

        def cap(name: str, loaded: Any) -> None:
            install(getattr(loaded, name), caps, journal)

        for known in (TRAINERS[kind] for kind in ROLLOUTS if caps):
            hook = functools.partial(cap, known.configuration)
            wrapt.register_post_import_hook(hook, known.configuration_module)

    def needs(self, session: Session) -> tuple[Feature, ...]:
        """Return what our own caps need."""
        return (CAPS,) if session.config.of(CapsSettings).generation else ()

    def check_trainer(self, session: Session, trainer: Any) -> None:
        """Check that the caps took effect."""
        check(trainer, session.config.of(CapsSettings).generation)

    def call(self, session: Session, points: CallPoints) -> None:
        """Cap what a hand-written loop generates, if there is a cap."""
        caps = session.config.of(CapsSettings).generation
        if points.trainer is None and caps:
            from grpo_run.runtime.features.caps._loop import cap_loop

            cap_loop(caps, session, points)

    def rollouts(self, trainer: Any, session: Session, train_call: int, points: RolloutPoints) -> None:
        """Cap the trainer's rollouts, if there is a cap."""
        options = session.config.of(CapsSettings)
        settings = settings_of(trainer, options.generation)
        if not settings:
            return
        from grpo_run.runtime.features.caps._capping import Capping
        from grpo_run.runtime.features.caps._reports import RolloutReports

        def position() -> tuple[int, str]:
            return trainer.state.global_step, "train" if trainer.model.training else "eval"

        reports = RolloutReports(position, session, settings, train_call)
        capping = Capping(trainer, settings, report=reports.ended, decided=reports.begin)
        if capping.applies:
            points.generation.append(capping.cap_rollout)
            points.turns.append(capping.cap_turn)
            points.ends = capping.end_reasons
            points.leaving.append(functools.partial(capping.rows_left_out, options.masked_ends))
            points.hooks.enter_context(capping.prepared())


def _wrap_generate(module: Any) -> None:
    from grpo_run.runtime.rank.rollouts import generate_calls

    generate_calls.install()


PART = CapsPart()
