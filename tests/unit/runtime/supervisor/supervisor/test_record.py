"""Memory, status and journal say the same, and the journal says only what happened."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from support.builders.runtime.supervised_run import SupervisedRun
from support.journal import event

from grpo_run.runtime.history.history import History
from grpo_run.runtime.history.journal import Journal
from grpo_run.runtime.history.reader import RunReader, read_journal
from grpo_run.runtime.launch.config import Budget
from grpo_run.runtime.processes.agent import Directive


def test_a_second_supervisor_continues_the_counts(
    start: Callable[..., SupervisedRun], tmp_path: Path, collected: list[dict[int, int]]
) -> None:
    """Attempts, steps and failures are replayed from the journal."""
    run = start(step=7)
    run.poll(run.ranks.exit(1, signal=9))
    again = SupervisedRun(tmp_path / "run")
    again.attempt()
    assert again.supervisor.attempt.number == 1
    assert again.supervisor.history.step == 7
    assert again.supervisor.history.failures_without_progress == 1


def test_status_in_memory_equals_status_on_disk(start: Callable[..., SupervisedRun]) -> None:
    """Metrics and `grpo-run status` show the same."""
    run = start(step=7)
    run.poll()
    lock = run.directory.acquire()
    memory, disk = run.supervisor.status(), RunReader(run.directory).read()
    os.close(lock)
    assert (memory.state, memory.sentence, memory.supervisor_pid) == (
        disk.state,
        disk.sentence,
        disk.supervisor_pid,
    )
    assert memory.history.step == disk.history.step == 7


def test_a_decision_does_not_depend_on_reading_the_journal_back(start: Callable[..., SupervisedRun]) -> None:
    """The fault just written counts, even if the file can no longer be opened."""
    run = start(step=7, budget=Budget(failures_without_progress=0))
    run.directory.journal.unlink()
    assert run.poll(run.ranks.exit(1, signal=9)) is Directive.terminate
    assert run.supervisor.history.failures_without_progress == 1


def test_every_event_counts_once_in_memory_and_on_disk(start: Callable[..., SupervisedRun]) -> None:
    """The history that decisions are based on equals a replay of the journal, over two attempts."""
    run = start()
    rank = Journal(run.directory.journal, "run-1")
    for step in range(1, 8):
        run.vote(step)
        rank.write(
            event("checkpoint_published", rank=0, step=step, train_call=1, path=f"out/checkpoint-{step}")
        )
        run.poll()
    run.poll(run.ranks.exit(1, signal=9))
    run.attempt()
    run.train(step=7)
    run.vote(8)
    run.poll()
    run.poll()
    replayed = History.of(read_journal(run.directory.journal))
    assert replace(run.supervisor.history, parts=()) == replayed


def test_the_journal_contains_only_lifecycle_events_that_happened(
    start: Callable[..., SupervisedRun],
) -> None:
    """A membership change is neither a fault nor evidence; a stop between attempts is no restart."""
    run = start(step=7)
    run.supervisor.membership_changed()
    run.attempt()
    run.vote(8)
    run.train(step=7)
    run.poll()
    run.poll(run.ranks.exit(1, signal=9))
    run.supervisor.stop_without_ranks("SIGTERM")
    changes = [(record["because"], record["to"]) for record in run.events("state_changed")]
    assert changes == [
        ("step_committed", "running"), ("membership_changed", "recovering"), ("restarted", "starting"),
        ("fault", "collecting"), ("evidence_written", "recovering"), ("stop_requested", "stopping"),
        ("stopped", "stopped"),
    ]  # fmt: skip
    assert run.supervisor.exit_code == 75


def test_giving_up_before_the_first_rank_writes_one_lifecycle_event(
    start: Callable[..., SupervisedRun],
) -> None:
    """No rank failed and no evidence was written."""
    run = start()
    run.supervisor.give_up("RendezvousTimeoutError: no second node")
    assert [record["because"] for record in run.events("state_changed")] == ["gave_up"]
