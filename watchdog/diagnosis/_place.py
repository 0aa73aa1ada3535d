"""Where training was when a rank ended, as users and `--inject` count steps.

Used by `exits.py` for its sentences, and by `_hangs.py`. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping

from grpo_run.watchdog.memory.shortage import OUTSIDE, MemoryPhase, Shortage
from grpo_run.watchdog.observation import PHASES_AFTER_STEP, Exit, Phase, Slot
from grpo_run.watchdog.text import place_name

_STEP_ITSELF = frozenset({Phase.forward_backward, Phase.optimizer})
"""Phases that only the computation of a step has. A callback at the end of the step runs inside them."""
_ROLLOUT = frozenset({Phase.score, Phase.generate})
"""Phases in which tools run, for the next step or for an evaluation."""


def last_step(slots: Mapping[int, Slot | None]) -> int:
    """Return the last optimizer step that any rank has completed."""
    return max((slot.step for slot in slots.values() if slot is not None), default=0)


def phases_of(exit: Exit, slot: Slot | None) -> tuple[Phase, ...]:
    """The phases in which a rank ended, the outermost first: those of its exception, or else those on the
    board.
    """
    if exit.error is not None and exit.error.phases is not None:
        return exit.error.phases
    return tuple(one.phase for one in slot.phases) if slot is not None else ()


def phase_of(exit: Exit, slot: Slot | None) -> str | None:
    """The name of the innermost phase in which a rank ended; None outside phases."""
    phases = phases_of(exit, slot)
    return phases[-1].name if phases else None


def position_of(culprit: Exit, slot: Slot | None, step: int, shortage: Shortage | None = None) -> str:
    """Where the culprit was, after a space: by its own slot, because the other ranks may be a step ahead of
    it.

    Empty for a script that trains by itself, whose steps are not counted.

    Args:
        culprit: the rank's exit.
        slot: of the culprit; None if it could not be read.
        step: the last optimizer step that any rank completed.
        shortage: memory that the rank has exhausted; its phase is finer than that of the board.
    """
    if slot is None:
        return f" {position(step, None)}"
    if slot.trains_without_trainer:
        return ""
    phases = phases_of(culprit, slot)
    raised = culprit.error is not None and culprit.error.phases is not None
    callback = culprit.error.callback if raised and culprit.error is not None else slot.callback
    outer = set(phases[:-1])
    rolls_out = bool(_ROLLOUT & outer) and Phase.eval not in outer
    inside_step = bool(_STEP_ITSELF & outer) or rolls_out or callback.endswith(".on_step_begin")
    named = shortage is not None and shortage.phase not in OUTSIDE | {MemoryPhase.evaluate}
    finer = str(shortage.phase) if shortage is not None and named else ""
    place = position(
        slot.step,
        phases[-1].name if phases else None,
        callback=callback,
        inside_step=inside_step,
        finer=finer,
    )
    return f" {place}"


def position(
    step: int, phase: str | None, *, callback: str = "", inside_step: bool = False, finer: str = ""
) -> str:
    """Return where training was, as users and `--inject` count steps: step 7 lasts until it is completed.

    Args:
        step: the last optimizer step that the rank completed.
        phase: what the rank was doing; None if it is not known.
        callback: class and event of the user's callback that was running; "" outside callbacks.
        inside_step: the phase is part of the computation of the next step, whatever phase it is.
        finer: the part of the phase that is named instead of it; "" if it is not known.
    """
    if phase is None or phase == Phase.startup.name:
        return f"after step {step}" if step else "before the first step"
    where = f"in step {step + 1}"
    if Phase[phase] in PHASES_AFTER_STEP and not inside_step:
        where = f"after step {step}" if step else "before the first step"
    return f"{where} ({place_name(callback)})" if callback else f"{where} (phase {finer or phase})"
