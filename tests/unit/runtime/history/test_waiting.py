"""What a run waits for, in words, and when it is worth showing."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from grpo_run.runtime.history._wait_line import WaitLine, find_wait, waiting_text
from grpo_run.watchdog.observation import OpenPhase, Phase, RankState, Slot
from grpo_run.watchdog.stalls.awaited import AwaitedRank


def awaited(deadline_seconds: float = 600.0, **changes: Any) -> AwaitedRank:
    """Rank 0 has waited for rank 1 since 1,000 s."""
    fields: dict[str, Any] = {
        "rank": 1, "phase": Phase.reward, "since_seconds": 1000.0,
        "deadline_at_seconds": 1000.0 + deadline_seconds,
        "busy": None, "waiters": (0,),
    }  # fmt: skip
    return AwaitedRank(**(fields | changes))


def wait_after(
    seconds: float, step_seconds: float | None, deadline_seconds: float = 600.0
) -> WaitLine | None:
    """What is shown after the wait has lasted for `seconds`."""
    return find_wait(awaited(deadline_seconds), (), now=1000.0 + seconds, step_seconds=step_seconds)


@pytest.mark.parametrize(
    ("seconds", "step_seconds", "shown"),
    [
        (4.9, 0.1, False),
        (5.0, 0.1, True),
        (5.0, None, True),
        (59.0, 60.0, False),
        (60.0, 60.0, True),
        (119.0, 900.0, False),
        (120.0, 900.0, True),
    ],
)
def test_a_wait_is_shown_once_it_is_longer_than_usual(
    seconds: float, step_seconds: float | None, shown: bool
) -> None:
    """Longer than a step, or than a fifth of its deadline, and than 5 s."""
    assert (wait_after(seconds, step_seconds) is not None) is shown


def test_a_wait_keeps_its_key_while_it_lasts() -> None:
    """Another rank, phase or callback is another wait."""
    waits = [
        find_wait(rank, (), now=now, step_seconds=None)
        for rank, now in (
            (awaited(), 1006.0),
            (awaited(deadline_at_seconds=9000.0), 2000.0),
            (awaited(rank=0), 1006.0),
            (awaited(phase=Phase.data), 1006.0),
            (awaited(callback="Upload.on_save"), 1006.0),
        )
    ]
    keys = [wait.key for wait in waits if wait is not None]
    assert keys[0] == keys[1]
    assert len(set(keys)) == 4


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, "waiting for rank 1: reward, 6 min (deadline 10 min)"),
        (
            {"phase": Phase.callback, "callback": "Upload.on_save"},
            "waiting for rank 1: callback Upload.on_save, 6 min (deadline 10 min)",
        ),
        (
            {"phase": Phase.idle, "exiting": True},
            "waiting for rank 1: exit after its last line, 6 min (deadline 10 min)",
        ),
        (
            {"outside": "10.0.0.5:8000"},
            "waiting for rank 1: reward, 6 min (deadline 10 min), connected to 10.0.0.5:8000",
        ),
        ({"phase": Phase.idle}, "waiting for rank 1: outside train(), 6 min (deadline 10 min)"),
        ({"deadline_at_seconds": math.inf}, "waiting for rank 1: reward, 6 min"),
    ],
)
def test_the_text_says_who_where_for_how_long_and_until_when(changes: dict[str, Any], text: str) -> None:
    """As far as it is known."""
    assert waiting_text(awaited(**changes), 1360.0) == text


def test_a_sentence_begins_with_a_capital_letter() -> None:
    """And ends with a full stop."""
    wait = wait_after(360.0, None)
    assert wait is not None
    assert wait.sentence == "Waiting for rank 1: reward, 6 min (deadline 10 min)."


@pytest.fixture
def slot() -> Callable[..., Slot]:
    """Build the slot of a rank in this phase, whose last progress was at 1,000 s."""

    def make(phase: Phase | None, **changes: Any) -> Slot:
        fields: dict[str, Any] = dict.fromkeys(Slot.__dataclass_fields__, 0)
        fields |= {
            "state": RankState.training, "last_progress_seconds": 1000.0,
            "phases": () if phase is None else (OpenPhase(phase=phase, since_seconds=990.0),),
        }  # fmt: skip
        return Slot(**(fields | changes))

    return make


@pytest.mark.parametrize(
    ("phases", "text"),
    [
        ((Phase.reward, Phase.reward), "no progress for 41 s in reward"),
        ((Phase.reward, Phase.data), "no progress for 41 s: rank 0 in reward, rank 1 in data"),
        ((Phase.reward, Phase.data, Phase.eval), "no progress for 41 s"),
        ((Phase.reward, None), "no progress for 41 s in reward"),
        ((None, None), "no progress for 41 s"),
    ],
)
def test_silence_of_all_ranks_is_shown(
    slot: Callable[..., Slot], phases: tuple[Phase | None, ...], text: str
) -> None:
    """It is not known which of them waits for which."""
    wait = find_wait(
        None, [slot(phase, rank=rank) for rank, phase in enumerate(phases)], now=1041.0, step_seconds=20.0
    )
    assert wait is not None
    assert wait.text == text


def test_silence_is_not_shown_if_it_is_usual_or_not_certain(slot: Callable[..., Slot]) -> None:
    """A rank works, is not in `train()`, or cannot be read; or steps are long."""
    quiet = slot(Phase.reward)

    def wait(*slots: Slot | None, step_seconds: float | None = None) -> WaitLine | None:
        return find_wait(None, slots, now=1041.0, step_seconds=step_seconds)

    assert wait(quiet) is not None
    assert wait(quiet, slot(Phase.generate, last_work_seconds=1040.0)) is None
    assert wait(quiet, slot(Phase.generate, last_progress_seconds=1035.0)) is None
    assert wait(quiet, slot(None, state=RankState.between)) is None
    assert wait(quiet, None) is None
    assert wait() is None
    assert wait(quiet, step_seconds=21.0) is None
