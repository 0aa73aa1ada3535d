"""`grpo-run status`: the summary first."""

from __future__ import annotations

import json
import time
from typing import Any

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


def write(run: RunDirectory, name: str, **fields: Any) -> None:
    """Add one event to the journal."""
    journal = Journal(run.journal, "night")
    journal.write(event(name, **fields))


def end(run: RunDirectory, sentence: str) -> None:
    """Record that the run gave up with this sentence."""
    write(run, "run_ended", exit_code=93, sentence=sentence)


def test_the_summary_is_the_first_line(run: RunDirectory, capsys: Captured) -> None:
    """The facts follow."""
    end(run, "Rank 1 was killed by SIGKILL in step 8.")
    assert main(["status", "night"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].strip() == "Rank 1 was killed by SIGKILL in step 8."
    assert "7 of 10" in "\n".join(lines[1:])


@pytest.mark.parametrize(
    "words",
    [
        "Rank 1 raised ValueError in step 8 (phase reward): " + "a long story " * 12 + "ends.",
        "unbalanced [/INST] in the answer",
        "KeyError: [rank1] [bold]x[/bold]",
    ],
)
def test_a_summary_is_one_line_without_markup(run: RunDirectory, capsys: Captured, words: str) -> None:
    """A pipe gets unfolded lines, so that a program can read the first. Chat templates have brackets."""
    end(run, words)
    assert main(["status", "night"]) == 0
    assert capsys.readouterr().out.splitlines()[0].strip() == words


def test_json_output_is_one_object(run: RunDirectory, capsys: Captured) -> None:
    """Standard output holds nothing else."""
    end(run, "Gave up.")
    assert main(["status", "--json"]) == 0
    shown = capsys.readouterr()
    value = json.loads(shown.out)
    found = [value[name] for name in ("run_id", "step", "exit_code", "sentence")]
    assert found == ["night", 7, 93, "Gave up."]
    assert shown.err == ""


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
    main(["status", "--json"])
    value = json.loads(capsys.readouterr().out)
    waiting = value["waiting"]
    assert (waiting["rank"], waiting["phase"], waiting["callback"]) == (1, "reward", None)
    assert (waiting["deadline_seconds"], waiting["waiters"]) == (1620.0, [0])
    assert 360.0 <= waiting["seconds"] < 420.0
    assert value["sentence"] == lines[0]
    assert value["remaining_seconds"] is None
    assert value["ranks"][0]["memory"]["phases"]["optimizer"]["peak_allocated_bytes"] == 70 * 2**30


@pytest.mark.usefixtures("owned")
def test_a_rank_that_has_not_started_is_not_called_unobservable(run: RunDirectory, capsys: Captured) -> None:
    """Fresh interpreters import for many seconds."""
    write(run, "state_changed", to="starting")
    Board.create(run.board, 1)
    main(["status"])
    assert "  local rank 0: has not started yet" in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(("code", "state"), [(0, "finished"), (75, "stopped")])
def test_a_script_without_a_trainer_is_not_at_a_step(
    run: RunDirectory, capsys: Captured, code: int, state: str
) -> None:
    """No step 0, no checkpoint that is still to come, and nothing that cannot be recovered from."""
    run.journal.unlink()
    write(run, "run_started")
    write(run, "run_ended", exit_code=code, sentence="")
    assert main(["status", "night"]) == 0
    shown = capsys.readouterr().out
    assert f"state       {state}" in shown
    assert "none counted" in shown
    assert [words for words in ("step 0", "none yet", "nothing to recover") if words in shown] == []


def test_excluded_samples_are_counted_by_reason(run: RunDirectory, capsys: Captured) -> None:
    """Nothing is said of them if there are none."""
    assert main(["status", "night"]) == 0
    assert "masked" not in capsys.readouterr().out
    write(run, "sample_masked", rank=1, step=8, function="accuracy", reason="nan", samples=[5, 6], count=2)
    write(run, "sample_masked", rank=0, step=8, function=None, reason="deadline", samples=[1], count=1)
    write(run, "group_masked", rank=0, step=8, groups=[1], count=1, of=2, steps_without_samples=0)
    assert main(["status", "night"]) == 0
    assert "3 samples (nan 2, deadline 1), 1 whole group" in capsys.readouterr().out
    assert main(["status", "night", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["masked"]["samples"] == {"nan": 2, "deadline": 1}


def test_a_memory_plan_is_shown_where_there_is_one(run: RunDirectory, capsys: Captured) -> None:
    """In text and as JSON; a run that has the script's own settings shows nothing."""
    main(["status", "night"])
    assert "memory plan" not in capsys.readouterr().out
    write(run, "plan_changed", plan={"micro_batch_divisor": 4})
    main(["status", "night"])
    assert "micro-batch=4" in capsys.readouterr().out
    main(["status", "night", "--json"])
    assert json.loads(capsys.readouterr().out)["memory_plan"] == {"micro_batch_divisor": 4}


def test_what_makes_steps_slower_is_shown(run: RunDirectory, capsys: Captured) -> None:
    """With the sentence that was printed."""
    write(run, "growth_found", rank=0, step=9, phase="Scan.on_log", factor=1.5, sentence="callback Scan")
    assert main(["status", "night"]) == 0
    assert "  callback Scan" in capsys.readouterr().out.splitlines()


def test_findings_of_the_memory_trace_are_listed(run: RunDirectory, capsys: Captured) -> None:
    """With ranks and attempts; as JSON too. A report that there is none of says where they are."""
    journal = Journal(run.journal, "night")
    for attempt in (0, 1):
        journal.attempt = attempt
        journal.write(
            event("memory_finding", rank=1, step=8, world_size=2, key="a", subject="b",
            sentence="5 tensors, held by list `a`"
        ))  # fmt: skip
    assert main(["status", "night"]) == 0
    assert "memory: rank 1: 5 tensors, held by list `a` (found in 2 attempts)" in capsys.readouterr().out
    assert main(["status", "night", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["memory_trace"]["findings"]
    assert (found["ranks"], found["attempts"]) == ([1], [0, 1])
    assert main(["report", "night", "--incident", "last"]) == 2
    assert "`grpo-run status" in capsys.readouterr().err
