"""Snapshots of several hosts: who has what after a copy, and what the next attempt loads."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.snapshot_hosts import SnapshotHosts, content, together

from grpo_run.runtime.errors import NoHeadroomError
from grpo_run.runtime.launch.rank_settings import RankSettings
from grpo_run.runtime.rank import host_link
from grpo_run.runtime.rank.saving import copies
from grpo_run.runtime.snapshots.area import StagingArea
from grpo_run.runtime.snapshots.parts import read_parts
from grpo_run.runtime.snapshots.slot import StagingSlot

Files = dict[str, bytes]


@pytest.fixture
def run(
    tmp_path: Path, make_settings: Callable[..., RankSettings], monkeypatch: pytest.MonkeyPatch
) -> Iterator[SnapshotHosts]:
    """A run over several hosts."""
    made = SnapshotHosts(tmp_path, make_settings(), monkeypatch)
    yield made
    made.close()


def written(hosts: int, step: int) -> Files:
    """What all hosts have written in a step."""
    return {f"rank{host}.bin": content(host, step) for host in range(hosts)}


def slot_of(memory: Path, step: int) -> StagingSlot:
    """The slot with a snapshot of this step, or with parts of one."""
    return next(
        slot
        for slot in StagingArea(memory).slots
        if (parts := read_parts(slot)) is not None and parts.staged.step == step
    )


def parts_in(memory: Path, step: int) -> set[int]:
    """The parts of a snapshot that a host has."""
    parts = read_parts(slot_of(memory, step))
    assert parts is not None
    return set(parts.files)


def test_every_part_is_on_two_hosts(run: SnapshotHosts) -> None:
    """Host 0 has all, host 1 that of host 0; all three have the same name for the snapshot."""
    hosts = run.attempt("a", "b", "c")
    assert together(hosts, lambda host: host.take(5)) == [True] * 3
    assert parts_in(run.memory("a"), 5) == {0, 1, 2}
    assert parts_in(run.memory("b"), 5) == {0, 1}
    assert parts_in(run.memory("c"), 5) == {2}
    found = [read_parts(slot_of(run.memory(name), 5)) for name in "abc"]
    assert len({parts.staged.order for parts in found if parts is not None}) == 1
    (complete,) = hosts[0].staging.snapshots()
    assert set(complete[0].files or ()) == {"rank0.bin", "rank1.bin", "rank2.bin"}
    assert not hosts[1].staging.snapshots()


@pytest.mark.parametrize("lost", ["a", "b", "c", ""])
def test_all_hosts_load_the_newest_snapshot_whichever_is_lost(lost: str, run: SnapshotHosts) -> None:
    """A host with empty memory gets all of it, also as host 0; the numbers of hosts may change."""
    hosts = run.attempt("a", "b", "c")
    for step in (5, 6, 7, 8):
        together(hosts, lambda host, step=step: host.take(step))  # type: ignore[misc]
    names = ["new" if name == lost else name for name in "cab"]
    hosts = run.attempt(*names)
    assert [host.loaded for host in hosts] == [written(3, 8)] * 3
    assert together(hosts, lambda host: host.take(9)) == [True] * 3
    hosts = run.attempt(*names)  # the attempts of a new host are few, and its snapshots are the newest
    assert [host.loaded for host in hosts] == [written(3, 9)] * 3


def test_without_one_part_an_older_snapshot_or_the_disk_is_used(run: SnapshotHosts) -> None:
    """Half a snapshot is never loaded."""
    hosts = run.attempt("a", "b", "c")
    for step in (5, 6):
        together(hosts, lambda host, step=step: host.take(step))  # type: ignore[misc]
    found = run.attempt("b", "new", "other")  # part 2 was on hosts a and c
    assert [host.recovered.name for host in found if host.recovered] == [None] * 3
    for name in "ac":
        slot_of(run.memory(name), 6).begin_snapshot()
    assert [host.loaded for host in run.attempt("a", "b", "c")] == [written(3, 5)] * 3


def test_a_damaged_part_is_not_used(run: SnapshotHosts) -> None:
    """Its bytes have changed since they were sent the first time: all hosts load from disk."""
    together(run.attempt("a", "b"), lambda host: host.take(5))
    shutil.rmtree(run.memory("b"))
    path = slot_of(run.memory("a"), 5).files / "checkpoint-5" / "rank1.bin"
    path.write_bytes(path.read_bytes().replace(b"host 1", b"host 7", 1))
    hosts = run.attempt("a", "b")
    assert [host.recovered.name for host in hosts if host.recovered] == [None] * 2
    assert "is used instead" in hosts[0].warned[-1]
    assert parts_in(run.memory("b"), 5) == {0}


def test_bytes_damaged_on_their_way_are_not_taken(
    run: SnapshotHosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sender's digest is of what it has read."""
    hosts = run.attempt("a", "b")
    original: Any = host_link.HostLink._send

    def damage(link: Any, target: int, tensor: Any) -> None:
        if target == 0 and tensor.numel() == 256:
            tensor = tensor + 1
        original(link, target, tensor)

    monkeypatch.setattr(host_link.HostLink, "_send", damage)
    assert together(hosts, lambda host: host.take(5, scheduled=True)) == [False] * 2
    assert parts_in(run.memory("a"), 5) == {0}
    assert not hosts[0].staging.snapshots()
    assert hosts[0].journal[-1]["event"] == "checkpoint_failed"
    monkeypatch.undo()


def test_a_host_without_memory_keeps_the_others_from_snapshots(
    run: SnapshotHosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What must reach the disk is then saved there directly. When there is memory, snapshots are taken
    again.
    """
    hosts = run.attempt("a", "b")

    def full(path: Path, size_bytes: int) -> Any:
        raise NoHeadroomError("full")

    with monkeypatch.context() as changed:
        changed.setattr(host_link, "_create", full)
        assert together(hosts, lambda host: host.take(5)) == [False] * 2
    assert together(hosts, lambda host: host.take(6)) == [False] * 2
    assert together(hosts, lambda host: host.take(7)) == [True] * 2


def test_a_part_that_cannot_be_declared_is_refused(
    run: SnapshotHosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for it; the next ones are copied."""
    hosts = run.attempt("a", "b")

    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as changed:
        changed.setattr(copies, "record_parts", full)
        assert together(hosts, lambda host: host.take(5)) == [False] * 2
    assert together(hosts, lambda host: host.take(6)) == [False] * 2
    assert together(hosts, lambda host: host.take(7)) == [True] * 2
    assert parts_in(run.memory("a"), 7) == parts_in(run.memory("b"), 7) == {0, 1}


def test_a_lost_host_ends_the_copies_quietly(run: SnapshotHosts, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a warning in the journal; nothing waits for them."""
    hosts = run.attempt("a", "b")

    def lost(link: Any, source: int, slot: Any, *, replace: bool = False) -> bool:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(host_link.HostLink, "receive", lost)
    monkeypatch.setattr(host_link.HostLink, "send", lost)
    assert together(hosts, lambda host: host.take(5)) == [False] * 2
    assert "not copied to other hosts any more" in hosts[0].warned[-1]
    assert together(hosts, lambda host: host.take(6)) == [False] * 2


def test_steps_that_the_run_goes_back_over_are_discarded_on_all_hosts(run: SnapshotHosts) -> None:
    """Only the supervisor of rank 0 knows of it, and its own snapshots are gone already."""
    hosts = run.attempt("a", "b")
    for step in (5, 6, 7):
        together(hosts, lambda host, step=step: host.take(step, scheduled=True))  # type: ignore[misc]
    for step in (6, 7):
        slot_of(run.memory("a"), step).begin_snapshot()
    hosts = run.attempt("a", "b", main={"discarded": (1, 6)})
    assert [host.loaded for host in hosts] == [written(2, 5)] * 2
    assert [host.loaded for host in run.attempt("b", "a")] == [written(2, 5)] * 2


def test_what_could_not_be_loaded_from_memory_is_loaded_from_disk(run: SnapshotHosts) -> None:
    """The supervisor of rank 0 has written it."""
    together(run.attempt("a", "b"), lambda host: host.take(5))
    hosts = run.attempt("a", "b", main={"loads_from_disk": True})
    assert [host.recovered.name for host in hosts if host.recovered] == [None] * 2


def test_a_scheduled_checkpoint_that_was_only_on_a_lost_host_is_completed(run: SnapshotHosts) -> None:
    """Host 0 is lost before it has written it to disk; the new one gets all of its parts."""
    hosts = run.attempt("a", "b")
    together(hosts, lambda host: host.take(5, scheduled=True))
    together(hosts, lambda host: host.take(6, scheduled=False))
    new, _ = run.attempt("new", "b")
    assert [staged.step for staged, slot in new.staging.snapshots() if not slot.drained] == [6, 5]
