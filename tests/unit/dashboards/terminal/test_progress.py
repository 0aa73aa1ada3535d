"""The progress line of `grpo-run launch`; see `progress.txt`."""

from __future__ import annotations

import json
from typing import Any

from support.builders.watchdog.slots import make_slot
from support.transcripts import Story, stories

from grpo_run.dashboards.terminal._progress import progress_line
from grpo_run.runtime.history.history import History
from grpo_run.runtime.history.recovery import Checkpoint, Recovery
from grpo_run.runtime.history.status import RunStatus
from grpo_run.watchdog.observation import Phase, RankState, Slot
from grpo_run.watchdog.stalls.awaited import AwaitedRank


class ProgressShell:
    """A run of two ranks, and its progress line."""

    def __init__(self) -> None:
        self.ranks: tuple[Slot | None, ...] = (None, None)
        self.awaited: AwaitedRank | None = None
        self.now = 996.0

    def slots(self, *given: str) -> None:
        """What each rank shows; null for one that cannot be read."""
        fields: list[Any] = [json.loads(text) for text in given]
        for one in fields:
            if one and "state" in one:
                one["state"] = RankState[one["state"]]
        self.ranks = tuple(one if one is None else make_slot(rank, **one) for rank, one in enumerate(fields))

    def wait(self, seconds: str, callback: str = "") -> None:
        """Rank 0 has waited for rank 1, with a deadline of 27 minutes, or 60 s for callbacks."""
        phase, deadline = (Phase.callback, 60.0) if callback else (Phase.reward, 1620.0)
        self.now = 1000.0 + float(seconds)
        self.awaited = AwaitedRank(
            rank=1, phase=phase, callback=callback, since_seconds=1000.0,
            deadline_at_seconds=1000.0 + deadline, busy=None, waiters=(0,),
        )  # fmt: skip

    def line(self, state: str = "running", width: str = "", pace: str = "", **given: str) -> str:
        """The line, whether ranks are starting, and who is waited for."""
        fields: dict[str, Any] = {name: json.loads(text) for name, text in given.items()}
        if "checkpoint" in fields:
            fields["checkpoint"] = Checkpoint(step=fields["checkpoint"], path="x", verified=True)
        fields["recoveries"] = [
            Recovery(cause="signal", rank=1, step=7, action="restart", recovery_seconds=seconds)
            for seconds in fields.get("recoveries", ())
        ]
        history = History(**fields)
        if pace:
            history.steps.begin(0, 0, 0.0)
            for step in range(1, 11):
                history.steps.commit(0, step, step * float(pace))
        status = RunStatus(
            run_id="night", state=state, sentence="", history=history, slots=self.ranks, supervisor_pid=1,
            awaited=self.awaited, read_at_seconds=self.now,
        )  # fmt: skip
        made = progress_line(status)
        marks = "(starting) " * made.starting + f"(wait {made.wait}) " * (made.wait is not None)
        return marks + (made.text(int(width)) if width else made.text()) or "nothing"


@stories(__file__, "progress.txt")
def test_progress(story: Story, word: str) -> None:
    """Every story of the file."""
    story.check(ProgressShell(), word)
