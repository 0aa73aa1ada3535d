"""Which evidence an incident collects, in which order and where."""

from __future__ import annotations

import json
import signal
import stat
from typing import Any

import pytest
from support.builders.runtime.incident_scene import Outcome, Scene, exited, stall

from grpo_run.runtime.supervisor.incident import JOURNAL_TAIL_LINES
from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.observation import Phase


def verdict_on_disk(outcome: Outcome) -> dict[str, Any]:
    """Return the content of verdict.json."""
    value: dict[str, Any] = json.loads((outcome.folder / "verdict.json").read_text())
    return value


def test_records_are_read_before_stacks_and_exits_after(scene: Scene) -> None:
    """The survivors of a broken collective exit within milliseconds."""
    scene.investigate(exited(1))
    assert scene.done == ["positions", "evidence", "exits"]
    assert scene.asked["exited"] == {0: False, 1: True}
    assert scene.asked["pids"] == {0: 100}


def test_a_finding_contains_its_records(scene: Scene) -> None:
    """They are not read again, and no exits are waited for."""
    scene.investigate(finding=stall())
    assert scene.done == ["evidence"]
    assert scene.asked["recordings"] == {0: b"{}"}


@pytest.mark.parametrize(("cause", "stuck"), [(Cause.reward_stall, []), (Cause.interpreter_stuck, [1])])
def test_native_frames_are_collected_only_of_stuck_interpreters(
    scene: Scene, cause: Cause, stuck: list[int]
) -> None:
    """They take seconds."""
    scene.investigate(finding=stall(cause))
    assert scene.asked["interpreter_stuck"] == stuck


def test_the_folder_is_named_after_the_cause(scene: Scene) -> None:
    """It contains verdict, timeline and missing evidence; only the owner can read it."""
    scene.watch.blind = {1: "its slot on the board cannot be read"}
    outcome = scene.investigate(exited(1, exit_code=None, signal=signal.SIGKILL))
    assert outcome.folder.name == "0001-signal"
    assert outcome.missing == ["no py-spy", "rank 1: its slot on the board cannot be read"]
    assert verdict_on_disk(outcome)["missing_evidence"] == outcome.missing
    assert json.loads((outcome.folder / "timeline.json").read_text())["ranks"] == {}
    assert {stat.S_IMODE(file.stat().st_mode) for file in outcome.folder.iterdir()} == {0o600}


def test_the_last_lines_of_the_journal_are_evidence(scene: Scene) -> None:
    """Complete lines, up to a limit."""
    scene.run.journal.write_text("".join(f'{{"n": {number}}}\n' for number in range(JOURNAL_TAIL_LINES + 50)))
    scene.investigate(exited(1))
    assert len(scene.asked["events"]) == JOURNAL_TAIL_LINES
    assert scene.asked["events"][-1] == f'{{"n": {JOURNAL_TAIL_LINES + 49}}}\n'


def test_the_memory_that_each_rank_has_measured_is_evidence(scene: Scene) -> None:
    """By global rank, also of a rank that has exited; a rank that has measured nothing is left out."""
    area = scene.board.writer(0, rank=1, pid=1, attempt=0).memory_area
    area.figures(Phase.generate).peak_allocated_bytes = 9
    area.publish(Phase.generate)
    scene.investigate(exited(1))
    found = scene.asked["rank_memory"]
    assert list(found) == [1]
    assert found[1]["phases"]["generate"]["peak_allocated_bytes"] == 9


def test_incidents_are_numbered(scene: Scene) -> None:
    """A new incident does not overwrite an earlier one."""
    names = [scene.investigate(exited(1)).folder.name[:4] for _ in range(3)]
    assert names == ["0001", "0002", "0003"]
