"""`grpo-run status`: the summary first."""

from __future__ import annotations

import json
import time

import pytest
from support.journal import event

from grpo_run.cli.main import main
from grpo_run.runtime.board.board import Board
from grpo_run.runtime.history.journal import Journal
from grpo_run.runtime.history.run_directory import RunDirectory
from grpo_run.watchdog.observation import Phase, RankState
from grpo_run.watchdog.stalls.awaited import AwaitedRank

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def run(run: RunDirectory) -> RunDirectory:
    """A run that gave up in step 8."""
    journal = Journal(run.journal, "night")
    journal.write(event("run_started"))
    journal.attempt = 0
    journal.write(event("attempt_started"))
    journal.write(event("train_started", rank=0, step=0, train_call=1, target_steps=10))
    journal.write(event("step_committed", step=7, train_call=1))
    journal.write(
        event("incident", step=7, cause="signal", culprit=1, signature="s", incident="incidents/0001-signal")
    )
    journal.write(event("action", action="stop"))
    return run


@pytest.mark.usefixtures("owned")
def test_ranks_step_time_time_left_and_waits_are_shown(run: RunDirectory, capsys: Captured) -> None:
    """While a supervisor is alive."""
    journal = Journal(run.journal, "night")
    journal.attempt = 1
    journal.write(event("attempt_started"))
    journal.write(event("train_started", rank=0, step=0, train_call=1, target_steps=100))
    now = time.time()
    for step in range(1, 9):
        journal.write(event("step_committed", step=step, train_call=1, committed_at=now + 2.0 * step))
    journal.write(event("state_changed", to="running"))
    board = Board.create(run.board, 2)
    writer = board.writer(0, rank=0, pid=17, attempt=1)
    writer.state, writer.step = RankState.training, 8
    writer.enter(Phase.reward)
    writer.publish()
    writer.memory_area.totals.readings = 2
    for phase, highest in ((Phase.generate, 3), (Phase.optimizer, 2)):
        writer.memory_area.figures(phase).peak_resident_bytes = highest * 2**30
        writer.memory_area.publish(phase)
    main(["status"])
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert "step        8 of 100, 2.00 s/step, 3 min left" in lines
    assert "memory      at most 3.0 GiB on the host, by rank 0 in generate" in lines
    assert any(line.startswith("rank 0: step 8, phase reward for ") for line in lines)
    assert "local rank 1: cannot be observed" in lines
    since = time.monotonic() - 360.0
    board.write_awaited(
        AwaitedRank(
            rank=1, phase=Phase.reward, since_seconds=since, deadline_at_seconds=since + 1620.0, busy=None,
            waiters=(0,)
        )
    )  # fmt: skip
    writer.memory_area.totals.has_device, writer.memory_area.totals.capacity_bytes = 1, 80 * 2**30
    writer.memory_area.figures(Phase.optimizer).peak_allocated_bytes = 70 * 2**30
    writer.memory_area.publish(Phase.optimizer)
    main(["status"])
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert "memory      at most 70.0 GiB of 80.0 GiB, by rank 0 in optimizer" in lines
    assert lines[0].startswith(
        "Waiting for rank 1: reward, 6 min (deadline 27 min). Running at step 8 of 100, "
    )
    assert "step        8 of 100, 2.00 s/step" in lines
    assert any(line.startswith("rank 0: ") and ", waits for rank 1, " in line for line in lines)
    main(["status", "--json"])
    value = json.loads(capsys.readouterr().out)
    waiting = value["waiting"]
    assert (waiting["rank"], waiting["phase"], waiting["callback"]) == (1, "reward", None)
    assert (waiting["deadline_seconds"], waiting["waiters"], waiting["place"]) == (1620.0, [0], None)
    assert value["ranks"][0]["waits_for"] == 1
    assert 360.0 <= waiting["seconds"] < 420.0
    assert value["sentence"] == lines[0]
    assert value["remaining_seconds"] is None
    assert value["ranks"][0]["memory"]["phases"]["optimizer"]["peak_allocated_bytes"] == 70 * 2**30


@pytest.mark.usefixtures("owned")
def test_a_terminal_gets_the_next_commands(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the ranks print is followed while the run is active. A pipe gets what it always got."""
    assert main(["status", "night"]) == 0
    assert "grpo-run logs" not in capsys.readouterr().out
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert main(["status", "night"]) == 0
    assert "grpo-run logs -f night" in capsys.readouterr().out
