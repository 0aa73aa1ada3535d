"""At the end of a run, what is only in memory is written when there is room, or described."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.builders.runtime.draining_run import World

from grpo_run.runtime.snapshots._drain_messages import DrainFailed, DrainRequest
from grpo_run.runtime.snapshots.last_writes import OnlyInMemory, write_last

FREE = 100_000


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """A run on a disk that has no room."""
    made = World(tmp_path, monkeypatch)
    made.replies = lambda request: [
        DrainFailed(slot=request.slot, step=5, reason="no room", full=True, free_bytes=FREE)
    ]
    return made


def end(world: World, **changes: Any) -> tuple[OnlyInMemory | None, list[str]]:
    """End the run; return what stays in memory, and the messages."""
    said: list[str] = []

    def sleep(seconds: float) -> None:
        world.now += seconds

    arguments: dict[str, Any] = {"wait_seconds": 600.0, "interrupted": lambda: False}
    left = write_last(
        world.scheduler, notify=said.append, clock=lambda: world.now, sleep=sleep, **(arguments | changes)
    )
    return left, said


def test_room_that_appears_during_the_wait_is_used(world: World) -> None:
    """Nothing is left in memory, and the wait was announced once."""
    world.take(0, 5)
    began, full = world.now, world.replies
    world.replies = lambda request: world.drain(request) if world.now > began + 90 else full(request)
    left, said = end(world)
    assert left is None
    assert world.durable == ["checkpoint-5"]
    assert 90 < world.now - began < 130
    assert len(said) == 1
    assert said[0].startswith("waiting for room, at most 10 min")


def test_the_wait_ends_after_its_time_or_by_a_signal_and_is_left_out_during_a_stop(world: World) -> None:
    """What is left is named."""
    world.take(0, 5)
    began = world.now
    left, _ = end(world)
    assert 600 <= world.now - began < 602
    assert left is not None
    assert left.required
    began = world.now
    left, _ = end(world, interrupted=lambda: world.now > began + 3)
    assert 3 < world.now - began < 5
    left, said = end(world, interrupted=lambda: True)
    assert (left is not None, said) == (True, [])


@pytest.mark.parametrize(
    ("taken", "ended", "required"),
    [({}, {}, False), ({}, {"only_model": True}, True), ({"kept": True}, {}, True)],
    ids=["nobody has asked for it", "the only copy of a model", "asked for by the user"],
)
def test_only_what_is_required_is_waited_for(
    world: World, taken: dict[str, bool], ended: dict[str, bool], required: bool
) -> None:
    """A script that has saved itself has another copy of the last step; one that saves nothing has not."""
    world.take(0, 5, scheduled=False, urgent=True, **taken)
    began = world.now
    left, said = end(world, **ended)
    assert left is not None
    assert left.required is required
    assert (world.now - began >= 600, bool(said)) == (required, required)
    assert required or world.now == began


def test_the_sentence_says_what_is_where_for_how_long_and_how_much_room_is_missing(world: World) -> None:
    """The missing room is what has to be freed: with exactly so much more, the checkpoints are written."""
    world.take(0, 5)
    world.take(1, 9)
    left, _ = end(world, wait_seconds=0.0)
    assert left is not None
    for part in (
        f"{world.out}/checkpoint-5 and {world.out}/checkpoint-9 are only in memory, in {world.staging.path}",
        "until the machine or its container restarts",
        f"{world.out} has 98 KiB free and needs 932 KiB more: about 5.5 KiB to write, and 1.0 MiB that must",
    ):
        assert part in left.sentence
    assert left.needed_bytes == pytest.approx(5.5 * 1024, rel=0.02)


def test_a_disk_that_refuses_for_another_reason_is_quoted(world: World) -> None:
    """A quota's limit is not known."""
    world.replies = lambda request: [
        DrainFailed(slot=request.slot, step=5, reason="Disk quota exceeded (/out)", full=True)
    ]
    world.take(0, 5)
    left, _ = end(world, wait_seconds=0.0)
    assert left is not None
    assert left.sentence.endswith(f"could not be written to {world.out}: Disk quota exceeded (/out).")


def test_at_the_end_less_space_has_to_stay_free(world: World) -> None:
    """Nothing but the last events of the run is written after it."""
    requests: list[DrainRequest] = []

    def drain(request: DrainRequest) -> list[Any]:
        requests.append(request)
        return world.drain(request)

    world.replies = drain
    world.take(0, 5)
    world.poll()
    world.take(1, 9)
    end(world)
    assert [request.last for request in requests] == [False, True]
