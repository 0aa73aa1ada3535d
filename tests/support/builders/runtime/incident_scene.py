"""The scene of an incident: ranks that have exited, a detector with fixed answers, and the order of what is
done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_run.runtime.board.board import Board
from grpo_run.runtime.history.attempt_files import AttemptFiles
from grpo_run.runtime.history.run_directory import RunDirectory
from grpo_run.runtime.supervisor import incident
from grpo_run.runtime.supervisor.attempt import Attempt, Exits
from grpo_run.runtime.supervisor.detection.finding import HangFinding
from grpo_run.runtime.supervisor.incident import IncidentContext
from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.deadlocks.collectives import Collective, CollectiveProgress
from grpo_run.watchdog.deadlocks.positions import Position
from grpo_run.watchdog.diagnosis.fault import diagnose
from grpo_run.watchdog.evidence.collection import Collected
from grpo_run.watchdog.observation import Exit, Phase, RankError
from grpo_run.watchdog.stalls.stall import Stall
from grpo_run.watchdog.verdict import Verdict

PEER_GONE = "Connection closed by peer [127.0.0.1]:4711"


def record(operation: str) -> Collective:
    """The third collective of the default group."""
    return Collective(
        group="0",
        sequence=3,
        operation=operation,
        sizes=((3,),),
        dtypes=("Float",),
        progress=CollectiveProgress.waiting,
    )


def exited(rank: int, **changes: Any) -> Exit:
    """A rank that exited with code 1."""
    fields: dict[str, Any] = {"rank": rank, "pid": 100 + rank, "exit_code": 1, "signal": None, "order": rank}
    return Exit(**(fields | changes))


def victim(rank: int) -> Exit:
    """A rank that lost its connection."""
    error = RankError(type="RuntimeError", message=PEER_GONE, traceback="", location=None, wall_time=1.0)
    return exited(rank, error=error)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A verdict, the folder that contains it, and the evidence that is missing."""

    verdict: Verdict
    folder: Path
    missing: list[str]


class FakeExits(Exits):
    """Given exits; a wait adds those of the scene, and a wait for ranks those that take long."""

    def __init__(self, scene: Scene, seen: Sequence[Exit]) -> None:
        super().__init__(AttemptFiles(scene.run, 0), lambda rank, text: None)
        self.seen = list(seen)
        self._scene = scene

    def wait(self, ranks: Any, seconds: float, slots: Any, *, until: Any = ()) -> None:
        self._scene.done.append("exits")
        self.seen += [one for one in self._scene.slow if one.rank in until] if until else self._scene.further


class Scene:
    """A run directory, a detector with fixed answers, and the order in which things were done."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.run = RunDirectory(path=path)
        self.run.create()
        self.board = Board.create(self.run.board, 2)
        self.done: list[str] = []
        self.asked: dict[str, Any] = {}
        self.records = {0: record("all_reduce"), 1: record("all_reduce")}
        self.further: list[Exit] = []
        self.slow: list[Exit] = []
        self.watch = SimpleNamespace(
            positions=self._positions, collective_logs=lambda: {0: [], 1: []}, recordings={0: b"{}"}, blind={}
        )
        monkeypatch.setattr(incident.collection, "collect", self._collect)

    def investigate(self, *exits: Exit, **changes: Any) -> Outcome:
        """Investigate the scene."""
        return self.investigate_in(self.context(*exits, **changes))

    def investigate_in(self, context: IncidentContext) -> Outcome:
        """Gather what there is to know, judge it, and close the folder."""
        found = incident.gather(self.run, context)
        verdict = diagnose(found.evidence)
        return Outcome(verdict=verdict, folder=found.close(verdict), missing=found.missing)

    def context(self, *exits: Exit, **changes: Any) -> IncidentContext:
        """The fault, with rank 0 at place 1 and rank 1 at place 0; ranks without an exit are alive."""
        gone = {exit.rank for exit in exits}
        attempt = Attempt(
            self.run, 0, warn=lambda rank, text: None, rank_of_local_rank={1: 0, 0: 1}, world_size=2
        )
        attempt.exits = FakeExits(self, exits)
        fields: dict[str, Any] = {
            "attempt": attempt,
            "ranks": SimpleNamespace(alive={1 - r: 100 + r for r in (0, 1) if r not in gone}),
            "board": self.board, "detector": self.watch, "best_position": (1, 5),
        }  # fmt: skip
        return IncidentContext(**(fields | changes))

    def _positions(self, slots: Any, exited: dict[int, bool]) -> dict[int, Position]:
        self.done.append("positions")
        self.asked["exited"] = exited
        return {
            rank: Position(rank=rank, records=(self.records[rank],), exited=exited[rank]) for rank in (0, 1)
        }

    def _collect(self, folder: Path, pids: dict[int, int], files: Any, **options: Any) -> Collected:
        self.done.append("evidence")
        self.asked.update(options, pids=pids, folder=folder)
        return Collected(missing=["no py-spy"], stacks={})


def stall(cause: Cause = Cause.reward_stall) -> HangFinding:
    """A finding that rank 1 hangs."""
    found = Stall(
        cause=cause, culprits=(1,), waiters=(0,), phase=Phase.reward, deadline_seconds=8.0,
        waited_seconds=9.0,
        sentence="Rank 1 hangs.",
    )  # fmt: skip
    return HangFinding(stall=found, began_at_seconds=0.0)
