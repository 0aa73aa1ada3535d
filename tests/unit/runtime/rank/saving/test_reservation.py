"""Rank 0 reserves a slot for all ranks, and waits for the disk only for a scheduled checkpoint."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any

import pytest
from support.saving import named
from support.snapshots import NO_MEMORY, SnapshotTrainer, Time, busy, steps, take
from support.transcripts import Story, stories
from support.vote_groups import ScriptedVotes

from grpo_run.runtime.rank.saving import _reservation as reservation
from grpo_run.runtime.rank.saving._reservation import SaveFlags
from grpo_run.runtime.rank.saving.contents import SaveMode
from grpo_run.runtime.rank.saving.snapshots import Snapshots
from grpo_run.watchdog.causes import Cause

Events = Callable[[], list[dict[str, Any]]]


class ReservationShell:
    """Rank 0 with three empty slots, on a clock that advances while it sleeps."""

    def __init__(
        self, snapshots: Snapshots, trainer: SnapshotTrainer, session: Any, clock: Time, events: Events,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:  # fmt: skip
        self.monkeypatch = monkeypatch
        self.snapshots, self.trainer, self.session = snapshots, trainer, session
        self.clock, self.events = clock, events
        self.work = 0
        self.record_work = session.slot.record_work
        session.slot.record_work = self._work

    def take(self, step: str, *words: str) -> str:
        """Take a snapshot, `own` or of the script; rank 0 may forbid it. Answers how long it took."""
        flags = SaveFlags(
            non_finite="non_finite" in words, **({"mode": SaveMode.directly} if "directly" in words else {})
        )
        began = self.clock.now
        outcome = take(self.snapshots, self.trainer, int(step), flags, scheduled="own" not in words)
        return f"{outcome} after {self.clock.now - began:.0f} s"

    def polls(self, seconds: str) -> None:
        """Rank 0 looks at the slots this rarely."""
        self.monkeypatch.setattr(reservation, "POLL_SECONDS", float(seconds))

    def votes(self, word: str = "") -> None:
        """Other ranks agree, or forbid what follows."""
        answer = (lambda values: [1, *values[1:]]) if word else (lambda values: values)
        self.session.votes = ScriptedVotes(answer)

    def sent(self) -> str:
        """What rank 0 has voted since."""
        values = self.session.votes.sent
        waits = [sent for sent in values if sent[-1] == reservation.WAITING]
        return f"{len(values) - len(waits)} votes, and {len(waits)} that it waits"

    def trouble(self, cause: str) -> None:
        """The disk is in trouble."""
        self.snapshots.staging.set_trouble(Cause[cause])

    def at(self, seconds: str, what: str) -> None:
        """After so long the oldest snapshot is `drained`, or the disk in `trouble`."""
        slot = self.snapshots.staging.slots[0]
        actions = {"drained": slot.mark_drained, "trouble": lambda: self.trouble("checkpoint_stall")}
        self.clock.at = (float(seconds) + self.clock.now - 100.0, actions[what])

    def holds(self) -> str:
        """The steps in memory, the newest first."""
        locked = any(busy(slot) for slot in self.snapshots.staging.slots)
        return f"{' '.join(map(str, steps(self.snapshots)))}{', locked' * locked}"

    def worked(self) -> str:
        """Whether each sleep was shown as work, and the cost of a snapshot is without the wait."""
        assert self.work >= self.clock.slept > 0
        return f"cost below a second: {self.snapshots.cost_seconds < 1.0}"

    def lost(self) -> str:
        """The checkpoints that were given up."""
        return ", ".join(f"{one['step']} {one['cause']}" for one in named(self.events, "checkpoint_failed"))

    def _work(self) -> None:
        self.work += 1
        self.record_work()


@stories(__file__, "reservations.txt")
def test_reservations(
    story: Story, word: str, snapshots: Snapshots, trainer: SnapshotTrainer, session: Any, clock: Time,
    events: Events, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Every story of the file."""
    story.check(ReservationShell(snapshots, trainer, session, clock, events, monkeypatch), word)


def test_a_removed_staging_area_is_a_lack_of_memory(
    snapshots: Snapshots, trainer: SnapshotTrainer, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A login manager may remove it during the run; the vote tells all ranks."""
    missing = FileNotFoundError(errno.ENOENT, "No such file or directory")

    def begin_snapshot(slot: Any) -> None:
        raise missing

    monkeypatch.setattr(type(snapshots.staging.slots[0]), "begin_snapshot", begin_snapshot)
    assert take(snapshots, trainer) == NO_MEMORY
    assert "no snapshot" in events()[-1]["text"]
    assert not any(busy(slot) for slot in snapshots.staging.slots)
