"""A supervisor with a real board and journal, and ranks that are no processes."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from grpo_run.runtime.board.slot_writer import SlotWriter
from grpo_run.runtime.features import modules
from grpo_run.runtime.history.lifecycle import RunState
from grpo_run.runtime.history.run_directory import RunDirectory
from grpo_run.runtime.launch.config import RunConfig
from grpo_run.runtime.processes.agent import Directive
from grpo_run.runtime.processes.ranks import RankGroup
from grpo_run.runtime.supervisor.supervisor import Supervisor
from grpo_run.watchdog.observation import Exit, Phase, RankState
from grpo_run.watchdog.stalls.exit_hangs import ExitFacts
from support.journal import read_records


class FakeRanks:
    """The processes of two ranks, as far as the supervisor observes them."""

    def __init__(self) -> None:
        self.pids = {0: 900, 1: 901}
        self.alive = dict(self.pids)
        self.later: list[Exit] = []
        self.signals = 0
        self._seen = 0

    def exit(self, rank: int, *, code: int | None = None, signal: int | None = None) -> Exit:
        """Make one exit."""
        del self.alive[rank]
        self._seen += 1
        return Exit(rank=rank, pid=900 + rank, exit_code=code, signal=signal, order=self._seen - 1)

    def request_exit(self) -> None:
        """Count the signals."""
        self.signals += 1

    def wait(self, timeout_seconds: float) -> list[Exit]:
        """Return the exits that happen during an investigation; none afterwards."""
        later, self.later = self.later, []
        return later


class SupervisedRun:
    """A supervisor, its ranks, and the messages it shows."""

    def __init__(self, path: Path, **changes: Any) -> None:
        self.directory = RunDirectory(path=path)
        self.directory.create()
        self.directory.write_run({"run_id": "run-1"})
        fields: dict[str, Any] = {
            "run_id": "run-1", "run_directory": path, "target": "train.py", "module": False, "arguments": (),
            "command": ("train.py",), "environment": {},
        }  # fmt: skip
        self.messages: list[str] = []
        self.supervisor = Supervisor(
            RunConfig(**(fields | changes)),
            self.directory,
            local_world_size=2,
            notify=self.messages.append,
            observe_exit=lambda pids, connections: self.remaining,
            parts=[module.PART() for module in modules("events")],
            features=[module.PART for module in modules("supervisor")],
        )
        self.remaining: ExitFacts | None = None
        self.supervisor.begin(world_size_local=2, accept_change=False)
        self.ranks = FakeRanks()
        self.outputs: Mapping[tuple[int, int], Path] = {}
        self.slots: dict[int, SlotWriter] = {}

    def attempt(self, *, world_size: int = 2) -> None:
        """Start an attempt as the agent does."""
        self.ranks = FakeRanks()
        workers = [
            SimpleNamespace(local_rank=rank, global_rank=rank, world_size=world_size) for rank in (0, 1)
        ]
        self.outputs = self.supervisor.attempt_starting(workers, 0)
        self.supervisor.attempt_started(cast(RankGroup, self.ranks))
        self.slots = {
            rank: self.supervisor.board.writer(
                rank, rank=rank, pid=900 + rank, attempt=self.supervisor.attempt.number
            )
            for rank in (0, 1)
        }

    def train(self, *, step: int = 0, call: int = 1) -> None:
        """Both ranks enter a `train()` call."""
        for slot in self.slots.values():
            slot.state = RankState.training
            slot.train_call = call
            slot.step = slot.voted_step = slot.committed_step = slot.resumed_step = step
            slot.target_steps = 100
            slot.replace(Phase.data)
            slot.publish()

    def vote(self, step: int, ranks: Sequence[int] = (0, 1)) -> None:
        """These ranks have completed a step."""
        for rank in ranks:
            self.slots[rank].step = self.slots[rank].voted_step = step
            self.slots[rank].voted_at_ns = time.monotonic_ns()
            self.slots[rank].publish()

    def done(self, *ranks: int) -> None:
        """These ranks' scripts have completed."""
        for rank in ranks:
            self.slots[rank].state = RankState.done
            self.slots[rank].publish()

    def finish(self, code: int) -> Directive:
        """Both scripts complete, and their ranks exit with a code."""
        self.done(0, 1)
        return self.poll(self.ranks.exit(0, code=code), self.ranks.exit(1, code=code))

    def raised(self, rank: int, **changes: Any) -> None:
        """The bootstrap of a rank has written an exception."""
        record = {
            "type": "KeyError", "message": "'reward'", "traceback": "Traceback ...", "wall_time": time.time(),
            "location": ["train.py", 3, "reward"],
        }  # fmt: skip
        self.supervisor.attempt.files.error(rank).write_text(json.dumps(record | changes))

    def poll(self, *exits: Exit) -> Directive:
        """Poll once."""
        return self.supervisor.poll(cast(RankGroup, self.ranks), exits)

    def events(self, name: str) -> list[dict[str, Any]]:
        """Return the events of one kind in the journal."""
        return [record for record in read_records(self.directory.journal) if record["event"] == name]

    @property
    def state(self) -> RunState:
        """The state of the lifecycle."""
        return self.supervisor.lifecycle.state
