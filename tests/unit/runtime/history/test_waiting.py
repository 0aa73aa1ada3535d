"""What a run waits for, in words, and when it is worth showing."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import fields
from typing import Any

from support.transcripts import Story, stories

from grpo_run.runtime.history._wait_line import WaitLine, find_wait
from grpo_run.watchdog.observation import OpenPhase, Phase, RankState, Slot
from grpo_run.watchdog.stalls.awaited import AwaitedRank

SLOTS: dict[str, dict[str, Any]] = {
    "worked": {"last_work_seconds": 1040.0},
    "progressed": {"last_progress_seconds": 1035.0},
    "between": {"state": RankState.between},
}


class WaitShell:
    """A run that has made its last progress at 1,000 s."""

    def __init__(self) -> None:
        self.wait: WaitLine | None = None
        self.keys: list[Hashable] = []

    def awaited(
        self, seconds: str, *, usual: str = "", deadline: str = "600", phase: str = "reward", rank: str = "1",
        exiting: str = "", **changes: Any,
    ) -> str:  # fmt: skip
        """What is shown after a rank has been waited for so long, where a step usually takes `usual`."""
        rank_waited_for = AwaitedRank(
            rank=int(rank), phase=Phase[phase], since_seconds=1000.0, busy=None, waiters=(0,),
            deadline_at_seconds=1000.0 + float(deadline), exiting=bool(exiting), **changes,
        )  # fmt: skip
        return self._shown(rank_waited_for, [], seconds, usual)

    def silent(self, seconds: str, *ranks: str, usual: str = "") -> str:
        """What is shown after so long without progress of ranks in these phases."""
        return self._shown(None, [slot_of(rank, word) for rank, word in enumerate(ranks)], seconds, usual)

    def key(self) -> str:
        """A letter for the key of the wait, the same for the same one."""
        assert self.wait is not None
        if self.wait.key not in self.keys:
            self.keys.append(self.wait.key)
        return "ABCDEF"[self.keys.index(self.wait.key)]

    def sentence(self) -> str:
        """The sentence of the wait."""
        assert self.wait is not None
        return self.wait.sentence

    def _shown(self, awaited: AwaitedRank | None, slots: Any, seconds: str, usual: str) -> str:
        step_seconds = float(usual) if usual else None
        self.wait = find_wait(awaited, slots, now=1000.0 + float(seconds), step_seconds=step_seconds)
        return "nothing" if self.wait is None else self.wait.text


def slot_of(rank: int, word: str) -> Slot | None:
    """What the board says of a rank."""
    if word == "unread":
        return None
    phase, _, state = word.partition(":")
    phases = () if phase == "none" else (OpenPhase(phase=Phase[phase], since_seconds=990.0),)
    made: dict[str, Any] = dict.fromkeys((field.name for field in fields(Slot)), 0)
    made |= {"rank": rank, "state": RankState.training, "last_progress_seconds": 1000.0, "phases": phases}
    return Slot(**(made | SLOTS.get(state, {})))


@stories(__file__, "waiting.txt")
def test_waiting(story: Story, word: str) -> None:
    """Every story of the file."""
    story.check(WaitShell(), word)
