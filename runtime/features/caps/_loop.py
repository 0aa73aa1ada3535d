"""Caps on what a hand-written loop generates (`trainers/loop.py`): calls of transformers' `generate`, and
loops of `consensus.while_any`.

Each call and each such loop is a rollout of its own, journaled when its step ends, so that a step that is
repeated after a fault ends as many tokens later. What cannot be capped is said once, after the first step.
Called by `rank.py`. Does not know what the script makes of a completion.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from grpo_run.runtime.features.caps._configuration import CapSettings, settings_of
from grpo_run.runtime.features.caps._criteria import Turn, without_effect
from grpo_run.runtime.features.caps._reports import RolloutKey, RolloutReports
from grpo_run.runtime.features.caps._rollout import CappedRollout
from grpo_run.runtime.features.caps.settings import OWN
from grpo_run.runtime.rank.points import CallPoints
from grpo_run.runtime.rank.rollouts import generate_calls, limits
from grpo_run.runtime.rank.rollouts.limits import Deadline
from grpo_run.runtime.rank.session import Session


def cap_loop(caps: Mapping[str, int | float], session: Session, points: CallPoints) -> None:
    """Cap a loop that is about to begin, until it ends.

    Args:
        caps: those of the command line, by their names.
    """
    settings = settings_of(points.trainer, caps)
    loop = LoopCaps(settings, session, points.train_call)
    if others := [name for name in caps if name not in OWN]:
        loop.warn(f"--generation {' and '.join(others)}: a hand-written loop has no configuration of TRL's")
    if settings.stops:
        points.hooks.enter_context(generate_calls.with_criteria(loop.cap_call))
        points.hooks.enter_context(limits.ended_by(loop.out_of_time))
        points.step_ends.append(loop.step_ends)


class LoopCaps:
    """The caps of one loop on this rank."""

    def __init__(self, settings: CapSettings, session: Session, train_call: int) -> None:
        self._settings = settings
        self._session = session
        slot = session.slot
        self._reports = RolloutReports(lambda: (slot.step, "train"), session, settings, train_call)
        self._turns: list[tuple[RolloutKey | None, Turn]] = []
        """Of the step in progress."""
        self._loop: Turn | None = None
        """Of the loop of `while_any` that runs."""
        self._unchecked = f"the first step of loop {train_call}"
        """What has yet to show that the caps have something to end."""

    def warn(self, text: str) -> None:
        """Say something on one rank."""
        if self._session.is_main:
            self._session.warn(text)

    def cap_call(self, arguments: dict[str, Any], part: bool) -> None:
        """Add a criterion to a call of `generate`."""
        configuration = arguments.get("generation_config") or arguments["self"].generation_config
        end = arguments.get("kwargs", {}).get("eos_token_id", configuration.eos_token_id)
        end_tokens = () if end is None else end if isinstance(end, (list, tuple)) else (end,)
        self._begin(frozenset(map(int, end_tokens))).add_to(arguments, part)

    def out_of_time(self, turns: int) -> bool:
        """Return whether a loop of `while_any` has no time left."""
        if turns == 1 or self._loop is None:
            self._loop = self._begin(frozenset())
        return self._loop.out_of_time(turns)

    def _begin(self, end_tokens: frozenset[int]) -> Turn:
        seconds, decided = self._settings.max_time, self._reports.begin()
        rollout = CappedRollout(
            end_tokens=end_tokens,
            max_length=sys.maxsize,
            deadline=None if seconds is None else Deadline(seconds),
            decided=decided,
        )
        turn = Turn(rollout, self._settings.repetition, of_script=True)
        self._turns.append((self._reports.key, turn))
        return turn

    def step_ends(self, step: int) -> None:
        """Journal what the step has generated, and say once what cannot be capped."""
        turns, self._turns = self._turns, []
        for key, turn in turns:
            turn.rollout.steps = turn.steps
            self._reports.ended(turn.rollout, key)
        what, self._unchecked = self._unchecked, ""
        if what and (wrong := without_effect([turn for _, turn in turns], self._settings, what)):
            self.warn(wrong)
