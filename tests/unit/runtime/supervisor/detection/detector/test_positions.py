"""Positions and collective logs after a fault come from what the ranks have left behind."""

from __future__ import annotations

import json

from support.builders.runtime.detector_world import World, mismatch


def test_positions_of_exited_ranks_come_from_their_logs(world: World) -> None:
    """No request is sent to an exited rank; a running one that does not answer is unknown."""
    mismatch(world)
    world.silent = {0: "reset"}
    positions = world.watch.positions(world.slots(), exited={0: False, 1: True})
    assert positions[0].records is None
    assert positions[1].exited
    assert [one.operation for one in positions[1].records or ()] == ["all_reduce", "all_gather"]
    assert world.watch.blind == {0: "no collective records: reset"}


def test_the_position_of_an_exited_rank_without_a_slot_is_unknown(world: World) -> None:
    """No records do not mean that it issued none."""
    mismatch(world)
    world.unreadable = {1}
    assert world.watch.positions(world.slots(), exited={0: False, 1: True})[1].records is None


def test_collective_logs_are_plain_values(world: World) -> None:
    """They are written to a file as JSON."""
    world.issue(0, "all_reduce", line=88)
    (note,) = json.loads(json.dumps(world.watch.collective_logs()[0]))
    assert (note["operation"], note["progress"], note["at"]) == (
        "all_reduce",
        "waiting",
        "train.py:88 in main",
    )
