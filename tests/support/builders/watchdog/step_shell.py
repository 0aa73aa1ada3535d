"""Two ranks in a step, whose slots change while time passes in polls: the shell of transcripts."""

from __future__ import annotations

import math
from typing import Any

from grpo_run.watchdog.observation import OpenPhase, Phase, RankState
from grpo_run.watchdog.stalls.deadlines import DeadlineSettings
from grpo_run.watchdog.stalls.step_clock import StepClock
from support.builders.watchdog.slots import make_slot


class StepShell:
    """Ranks 0 and 1 compute scores in their first step, and a clock that has seen nothing yet."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.clock = StepClock(DeadlineSettings(), self.now)
        self.ranks: dict[int, dict[str, Any]] = {}
        self.unreadable: set[int] = set()
        for rank in ("0", "1"):
            self.rank(rank)
        self.enter("forward_backward", "score")

    def rank(self, number: str, **fields: str) -> None:
        """Change fields of a rank's slot, which may be new. `state` and `phase` are names."""
        slot = self.ranks.setdefault(
            int(number),
            {
                "voted_step": 0, "tokens_generated": 0, "rewards_scored": 0, "last_work_seconds": 900.0,
                "step": 0, "phases": (),
            },
        )  # fmt: skip
        for name, value in fields.items():
            if name == "phase":
                slot["phases"] = (OpenPhase(phase=Phase[value], since_seconds=self.now),)
            else:
                slot[name] = (
                    RankState[value] if name == "state" else float(value) if "." in value else int(value)
                )

    def ranks_are(self, *numbers: str) -> None:
        """Leave only these ranks."""
        self.ranks = {int(number): self.ranks.get(int(number), self.ranks[0]) for number in numbers}

    def all(self, **fields: str) -> None:
        """Change fields of all ranks."""
        for rank in self.ranks:
            self.rank(str(rank), **fields)

    def enter(self, *phases: str) -> None:
        """All ranks are in these phases from now on, the outermost first."""
        opened = tuple(OpenPhase(phase=Phase[name], since_seconds=self.now) for name in phases)
        for slot in self.ranks.values():
            slot["phases"] = opened

    def commit(self) -> None:
        """The step is done, on all ranks."""
        for slot in self.ranks.values():
            slot["voted_step"] += 1

    def gap(self, seconds: str) -> None:
        """Nobody looks for this long."""
        self.now += float(seconds)

    def passes(self, seconds: str, doing: str = "nothing", *, every: str = "1", pace: str = "1") -> None:
        """Time passes in polls.

        Args:
            doing: `works` (the model runs, and makes a token in `generate`), `alternates` (phases begin and
                end, and nothing is done in them), `scores` (a reward every ten minutes).
            every: seconds between two polls.
            pace: seconds of a token on each rank, with commas; 0 for never.
        """
        end = self.now + float(seconds)
        paces = [int(one) for one in pace.split(",")]
        while self.now < end - 1e-9:
            self.now += float(every)
            if doing == "alternates":
                self.enter("forward_backward", "reward" if int(self.now) % 10 < 7 else "score")
            elif doing == "scores":
                self.enter("forward_backward", "reward")
            for (_, slot), each in zip(self.ranks.items(), paces * len(self.ranks), strict=False):
                if doing == "works":
                    slot["last_work_seconds"] = self.now
                    generates = slot["phases"][-1].phase is Phase.generate
                    token = generates and each > 0 and int(self.now) % each == 0
                    slot["generation_passes"] = slot.get("generation_passes", 0) + token
                elif doing == "scores":
                    slot["rewards_scored"] += int(self.now) % 600 == 0
            self.look()

    def look(self, unreadable: str = "") -> None:
        """One poll."""
        slots = {rank: make_slot(rank, **slot) for rank, slot in self.ranks.items()}
        self.clock.record(
            {rank: None if str(rank) == unreadable else slot for rank, slot in slots.items()}, self.now
        )

    def stall(self) -> str:
        """The stall that there is."""
        found = self.clock.stall()
        if found is None:
            return "nothing"
        return (
            f"{found.cause} by {found.culprits}, waiting {found.waiters}, in {found.phase.name},"
            f" {found.waited_seconds:.6g} s of {found.deadline_seconds:.6g} s\n{found.sentence}"
        )

    def clock_shows(self) -> str:
        """The step that is timed, and its deadline."""
        limit = self.clock.deadline_seconds
        return f"{self.clock.position}, {'never' if math.isinf(limit) else f'{limit:.6g} s'}"
