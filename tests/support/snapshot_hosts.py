"""Hosts in threads that take snapshots of small checkpoints and recover them: each has memory of its own.

Every host has one rank. Votes go through memory, parts through a real Gloo group.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from grpo_run.runtime.event import as_record
from grpo_run.runtime.launch.rank_settings import RankSettings
from grpo_run.runtime.rank import host_link
from grpo_run.runtime.rank.resuming.hosts import Recovered, recover
from grpo_run.runtime.rank.saving._reservation import SaveFlags
from grpo_run.runtime.rank.saving.copies import Copies
from grpo_run.runtime.rank.saving.snapshots import Snapshots
from grpo_run.runtime.snapshots.area import StagingArea
from support.slots import snapshot
from support.vote_groups import run_ranks, thread_votes


def content(host: int, step: int) -> bytes:
    """Return what a host writes in a step: more than one chunk."""
    return b"host %d, step %d " % (host, step) * 40


class SnapshotHost:
    """One host in one attempt.

    Args:
        number: of the host, which is also the rank.
        folder: its memory, which outlives the attempt.
    """

    def __init__(self, number: int, votes: Any, hosts: int, folder: Path, settings: RankSettings) -> None:
        self.number, self.folder = number, folder
        config = dataclasses.replace(settings.config, snapshot_directory=folder)
        self.journal: list[dict[str, Any]] = []
        self.warned: list[str] = []
        self.session: Any = SimpleNamespace(
            rank=number, host=number, hosts=hosts, is_main=number == 0, leads_host=True, votes=votes,
            settings=settings, config=config, warn=self.warned.append,
            warn_in_journal=self.warned.append, board=SimpleNamespace(requests=(False, 0)),
            slot=SimpleNamespace(record_work=lambda: None),
            journal=SimpleNamespace(write=lambda event: self.journal.append(as_record(event))),
        )  # fmt: skip
        self.staging = StagingArea(folder)
        self.recovered: Recovered | None = None
        self.copies: Copies
        self.snapshots: Snapshots

    def begin(self) -> SnapshotHost:
        """Recover what the hosts have in memory, and get ready for snapshots."""
        self.recovered = recover(self.session)
        self.copies = Copies(self.session, self.recovered.link, self.recovered.attempt)
        self.snapshots = Snapshots(self.session, self.staging, self.copies)
        return self

    def close(self) -> None:
        """End the thread of the copies and close the connections, as the end of the process would."""
        if self.copies._thread is not None:
            self.copies._requests.put(None)  # type: ignore[arg-type]
            self.copies._thread.join(10)
            assert not self.copies._thread.is_alive()
        self.copies._link._connected = None

    def take(self, step: int, **changes: Any) -> bool:
        """Take a snapshot and wait for its copies; return whether host 0 has all of it."""
        own = {"staged_at": 1000.0 + self.number + step, "scheduled": False}
        staged = snapshot(self.folder.parent / "out", step, **(own | changes))

        def write(folder: Path) -> None:
            (folder / f"rank{self.number}.bin").write_bytes(content(self.number, step))

        with self.snapshots.reserve(staged, SaveFlags(non_finite=False)) as reservation:
            if reservation.slot is None or not self.snapshots.write(reservation, write):
                return False
        return self.snapshots.await_copies()

    @property
    def loaded(self) -> dict[str, bytes]:
        """The files of the snapshot that was recovered, by name."""
        assert self.recovered is not None
        assert self.recovered.name is not None
        slot = self.staging.slots[self.recovered.name.slot]
        staged = slot.read_snapshot()
        assert staged is not None
        assert staged.order == self.recovered.name.order
        slot.check_complete(staged)
        return {path.name: path.read_bytes() for path in (slot.files / staged.folder).iterdir()}


class SnapshotHosts:
    """The hosts of one run, attempt by attempt.

    Args:
        folder: has the memory of each host.
        settings: of a rank.
    """

    def __init__(self, folder: Path, settings: RankSettings, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder = folder
        self._settings = settings
        self._monkeypatch = monkeypatch
        self._hosts: list[SnapshotHost] = []

    def memory(self, name: str) -> Path:
        """The memory of a host."""
        return self._folder / name

    def attempt(self, *names: str, main: dict[str, Any] | None = None) -> list[SnapshotHost]:
        """Begin an attempt on the hosts with these names, in the order of their numbers.

        Args:
            main: settings of rank 0.
        """
        self.close()
        store = dist.HashStore()
        self._monkeypatch.setattr(host_link, "attempt_store", lambda seconds: store)
        self._monkeypatch.setattr(host_link, "CHUNK_BYTES", 256)
        votes = thread_votes(len(names))
        self._hosts = [
            SnapshotHost(
                number, votes[number], len(names), self.memory(name),
                self._settings.model_copy(update=main if main and number == 0 else {}),
            )
            for number, name in enumerate(names)
        ]  # fmt: skip
        return together(self._hosts, SnapshotHost.begin)

    def close(self) -> None:
        """End the last attempt."""
        for host in self._hosts:
            host.close()


def together(hosts: list[SnapshotHost], do: Callable[[SnapshotHost], Any]) -> list[Any]:
    """Let all hosts do the same at the same time; return the results."""
    return run_ranks(*(lambda host=host: do(host) for host in hosts))
