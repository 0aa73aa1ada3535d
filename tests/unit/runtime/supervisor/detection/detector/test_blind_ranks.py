"""What cannot be observed proves nothing, and is listed with the reason."""

from __future__ import annotations

import os

import pytest
from support.builders.runtime.detector_world import World, hang_in, mismatch, move_to_nccl

from grpo_run.runtime.supervisor.detection._collective_records import MAX_UNANSWERED, SILENT_SECONDS, NoAnswer
from grpo_run.watchdog import processes
from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.observation import Phase


@pytest.mark.parametrize("silent", [{0}, {1}, {0, 1}])
def test_ranks_without_records_are_not_proved_wrong(world: World, silent: set[int]) -> None:
    """Each is listed as blind, with the reason."""
    mismatch(world)
    world.silent = dict.fromkeys(silent, "connection refused")
    assert world.advance(19.0) is None
    assert world.watch.blind == dict.fromkeys(silent, "no collective records: connection refused")
    assert world.watch.suspicion is None


def test_a_rank_whose_nccl_recorder_is_stuck_is_not_proved_wrong(world: World) -> None:
    """It may have issued more. Each request occupies a thread of its worker server, so there are few."""
    mismatch(world)
    move_to_nccl(world)
    world.silent_nccl = {1: NoAnswer("no answer within 0.5 s")}
    assert world.advance(SILENT_SECONDS + 9.0) is None
    assert set(world.watch.blind) == {1}
    assert sum(1 in asked for asked in world.asked_nccl) == MAX_UNANSWERED
    assert len(world.asked_nccl) > MAX_UNANSWERED


def test_an_unparsable_answer_makes_the_rank_blind(world: World) -> None:
    """The reason names the field, and nothing is proved."""
    mismatch(world)
    world.entries[1][-1]["collective_seq_id"] = "many"
    assert world.advance(10.0) is None
    assert "entries.1.collective_seq_id" in world.watch.blind[1]
    assert 0 not in world.watch.blind


def test_records_that_return_end_the_blindness(world: World) -> None:
    """The deadlock is then proved."""
    mismatch(world)
    world.silent = {1: "no answer within 0.5 s"}
    assert world.advance(10.0) is None
    world.silent = {}
    world.deadlocks(10.0)
    assert world.watch.blind == {}


def test_a_late_answer_is_reported_only_if_that_lasts(world: World) -> None:
    """A loaded machine is often late once; a rank that is silent for long cannot be seen."""
    mismatch(world)
    world.silent = {1: NoAnswer("no answer within 0.5 s")}
    assert world.advance(SILENT_SECONDS - 1) is None
    assert len(world.polls) >= 3
    assert world.watch.blind == {}
    assert world.advance(10.0) is None
    assert world.watch.blind == {1: "no collective records: no answer within 0.5 s"}


@pytest.mark.parametrize("unreadable", [{0}, {1}, {0, 1}])
def test_an_unreadable_slot_is_no_reason_to_act(world: World, unreadable: set[int]) -> None:
    """Neither for a proof nor, while other ranks wait for it, for a deadline."""
    mismatch(world)
    world.scan()
    world.unreadable = unreadable
    assert world.advance(200.0, every=0.5) is None
    assert world.watch.suspicion is None
    assert set(world.watch.blind) >= unreadable
    for rank in unreadable:
        assert world.watch.blind[rank] == "its slot on the board cannot be read"


def test_a_slot_that_is_readable_again_is_not_blind(world: World) -> None:
    """Its entry in `blind` is removed."""
    world.unreadable = {1}
    world.advance(1.0)
    world.unreadable = set()
    world.advance(1.0)
    assert world.watch.blind == {}


def test_a_truncated_board_makes_all_ranks_blind(world: World) -> None:
    """Nothing is read beyond the end of the file, which would raise SIGBUS in the supervisor."""
    mismatch(world)
    os.truncate(world.path, 4096)
    assert world.advance(200.0, every=0.5) is None
    assert set(world.watch.blind) == {0, 1}
    assert world.watch.phase_durations.by_rank() == {}
    assert world.watch.collective_logs() == {}
    assert world.watch.phase_durations.merged() == {}


def test_a_rank_whose_process_cannot_be_read_still_has_deadlines(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The verdict says nothing about its interpreter."""
    monkeypatch.setattr(processes, "read_main_thread", lambda pid: None)
    hang_in(world, Phase.reward)
    stall = world.stalls(25.0)
    assert (stall.cause, stall.culprits) == (Cause.reward_stall, (1,))
