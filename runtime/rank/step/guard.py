"""What the guarded `train()` calls and the loops of one attempt share on this rank.

There is one `AttemptState` per session (`guard_of`). `runtime/rank/hooks/train_call.py` and
`runtime/rank/loops/run.py` use it in every call. State of a single call is not kept here, and neither is the
rank's identity (`runtime/rank/session.py`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from grpo_run.runtime.checkpoints.manifest import TrainCall
from grpo_run.runtime.launch import rehearsal
from grpo_run.runtime.rank.points import RankFeature
from grpo_run.runtime.rank.resuming.hosts import Recovered, recover
from grpo_run.runtime.rank.session import Session
from grpo_run.runtime.rank.step.step_vote import UserRequests
from grpo_run.runtime.snapshots.area import StagingArea
from grpo_run.runtime.snapshots.slot import SnapshotName

if TYPE_CHECKING:
    from grpo_run.runtime.rank.saving.snapshots import Snapshots


class AttemptState:
    """State shared by the calls of one attempt: call count, snapshots, requests already handled."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.requests = UserRequests(session.board)
        self.features: tuple[RankFeature, ...] = ()
        """Take part in the calls."""
        self.claimed: set[int] = set()
        """Numbers of the calls of the run that were recognized in this attempt."""
        self.running: str | None = None
        """What is running: a `train()` call or a loop, as messages name it; None if nothing is."""
        self.logs: Callable[[Mapping[str, Any]], None] | None = None
        """Takes what the script logs of a step of the loop that is running; None if none is."""
        self.left: ExitStack | None = None
        """What a loop has set up that the script has left by `break`: it may go on until another call
        begins.
        """
        self._train_calls = 0
        self._warned_of_inner_call = False
        self._output_dirs: set[str] = set()
        self._snapshots: Snapshots | None = None
        self._recovered: Recovered | None = None

    def output_directory(self, chosen: str) -> str:
        """Return where the next call writes, if the script names this directory."""
        root = self.session.config.output_root
        if root is not None:  # of a replay, where each call has its own
            return str(root / f"call-{self._train_calls + 1}")
        rehearsed = rehearsal.current()
        return chosen if rehearsed is None else rehearsed.redirected(chosen)

    def begin_call(self, trainer_class: str, output_dir: str | os.PathLike[str]) -> TrainCall:
        """Number the next call by its position, and warn if an earlier call used the same directory.

        Args:
            trainer_class: name of the trainer's class; `call_names.LOOP` for a loop.
        """
        self.session.record_left_loop()
        if self.left is not None:
            self.left.close()
            self.left = None
        self._train_calls += 1
        call = TrainCall(
            ordinal=self._train_calls, trainer_class=trainer_class, output_dir=os.fspath(output_dir)
        )
        directory = os.path.realpath(call.output_dir)
        if directory in self._output_dirs:
            self.session.warn(
                f"{call.output_dir} was used by an earlier {call.kind}. Both number their checkpoints from 0,"
                " so a recovery may have to repeat the earlier one. Give each its own output_dir."
            )
        self._output_dirs.add(directory)
        return call

    def warn_of_inner_call(self, trainer: Any) -> None:
        """Warn once that a `train()` call inside another one is a part of that one's step."""
        if not self._warned_of_inner_call:
            self._warned_of_inner_call = True
            self.session.warn(
                f"a train() call inside another one ({type(trainer).__qualname__}) belongs to the step of the"
                " outer call: after a fault it is repeated with that step, and it has no checkpoints of"
                " its own"
            )

    def expected_snapshot(self) -> SnapshotName | None:
        """Return the snapshot in memory that the calls of this attempt load. Collective on several hosts, the
        first time.
        """
        session = self.session
        if session.hosts == 1:
            return session.settings.expected_snapshot
        if self._recovered is None:
            self._recovered = recover(session)
        return self._recovered.name

    @property
    def snapshots(self) -> Snapshots | None:
        """In-memory snapshots of this rank; None if checkpoints are written directly to disk."""
        directory, known = self.session.config.snapshot_directory, self._recovered
        if known is not None and not known.takes_snapshots:
            directory = None  # another host has none
        if self._snapshots is None and directory is not None:
            # imports torch, which only the script may import first
            from grpo_run.runtime.rank.saving.copies import Copies
            from grpo_run.runtime.rank.saving.snapshots import Snapshots

            copies = Copies(self.session, known.link, known.attempt) if known is not None else None
            self._snapshots = Snapshots(self.session, StagingArea(directory), copies)
        return self._snapshots


_guards: dict[Session, AttemptState] = {}


def guard_of(session: Session) -> AttemptState:
    """Return the guard of a session; the first call makes it."""
    if session not in _guards:
        _guards[session] = AttemptState(session)
    return _guards[session]
