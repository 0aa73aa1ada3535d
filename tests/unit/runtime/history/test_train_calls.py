"""The ledger of a run's `train()` calls, replayed from its journal."""

from __future__ import annotations

from typing import Any

from support.journal import as_event, as_events

from grpo_run.runtime.history.history import History
from grpo_run.runtime.history.train_calls import MAX_PASSED_CALLS
from grpo_run.runtime.supervisor.policy import start_of


def attempt(number: int) -> dict[str, Any]:
    """An attempt begins."""
    return {"event": "attempt_started", "attempt": number, "time": 100.0 * number}


def started(call: int, step: int = 0, **fields: Any) -> dict[str, Any]:
    """Rank 0 begins a call."""
    return {
        "event": "train_started", "rank": 0, "train_call": call, "step": step, "target_steps": 10,
        "trainer_class": "GRPOTrainer", "output_dir": f"/out/{call}", "time": 5.0, **fields,
    }  # fmt: skip


def saved(call: int, step: int) -> dict[str, Any]:
    """A checkpoint is on disk."""
    path = f"/out/{call}/checkpoint-{step}"
    return {"event": "checkpoint_published", "train_call": call, "step": step, "path": path}


def staged(call: int, step: int) -> dict[str, Any]:
    """A snapshot is in memory."""
    return {"event": "checkpoint_staged", "train_call": call, "step": step}


def start_after(*records: dict[str, Any]) -> str:
    """What a restart resumes from."""
    return start_of(History.of(as_events(records)))


def test_the_reason_of_a_restart_says_what_it_resumes_from() -> None:
    """A checkpoint, a newer snapshot, a later call, or nothing at all."""
    first = [attempt(0), started(1)]
    assert start_after(attempt(0)) == "from the start of the script"
    assert start_after(*first) == "from step 0, because no checkpoint or snapshot of it exists yet"
    assert start_after(*first, saved(1, 4)) == "from checkpoint-4"
    assert start_after(*first, saved(1, 4), staged(1, 5)) == "from the snapshot of step 5 in memory"
    assert start_after(*first, staged(1, 5), saved(1, 4)) == "from the snapshot of step 5 in memory"
    chosen = {"event": "resume_chosen", "rank": 0, "step": 100, "path": "/base/checkpoint-100"}
    assert start_after(attempt(0), chosen, started(1, 100)) == "from checkpoint-100"
    ended = {"event": "train_ended", "train_call": 1}
    assert "finished train() calls are restored" in start_after(*first, saved(1, 10), ended)
    assert (
        start_after(*first, saved(1, 10), ended, started(2), saved(2, 3))
        == "from checkpoint-3 of train() call 2"
    )


def test_a_node_without_rank_0_does_not_say_what_it_cannot_know() -> None:
    """Its journal has steps, but no calls."""
    committed = {"event": "step_committed", "train_call": 1, "step": 3}
    assert start_after(attempt(0), committed) == "from the checkpoint that rank 0 chooses"


def test_calls_are_passed_with_the_one_that_was_interrupted() -> None:
    """And with all directories that they have used, newest first."""
    records = [
        attempt(0), {"event": "rank_started", "rank": 0, "pid": 7}, started(1),
        {"event": "train_ended", "train_call": 1},
        started(2), saved(2, 4), attempt(1), started(2, 4, output_dir="/out/other"),
    ]  # fmt: skip
    first, second = History.of(as_events(records)).calls.to_pass()
    assert (first.finished, first.interrupted, first.directories[0].pid) == (True, False, 7)
    assert (second.finished, second.interrupted, second.saved) == (False, True, 4)
    assert [one.path for one in second.directories] == ["/out/other", "/out/2"]
    assert History.of(as_events(records)).calls.output_directories == ["/out/1", "/out/other", "/out/2"]
    assert second.directories[0].not_before == 100.0


def test_a_call_that_is_restored_is_no_longer_interrupted() -> None:
    """The rank was killed after it had marked the checkpoint, and before it had said so."""
    restored = {"event": "train_restored", "rank": 0, "train_call": 1, "step": 10}
    history = History.of(as_events([attempt(0), started(1), saved(1, 10), attempt(1), restored]))
    assert history.calls.interrupted is None
    assert history.calls.to_pass()[0].finished


def test_where_ranks_left_a_loop_is_passed_until_the_script_changes() -> None:
    """A resumed loop does not forget it: it may be killed before it is there again. A change of the script
    does.
    """

    def left(rank: int, after: int) -> dict[str, Any]:
        return {"event": "loop_left", "rank": rank, "train_call": 1, "step": 6, "ends_after": after}

    loop = started(1, trainer_class="loop")
    history = History.of(as_events([attempt(0), loop, left(1, 7), left(0, 7), attempt(1), loop]))
    assert history.calls.to_pass()[0].left == ((0, 7), (1, 7))
    assert history.calls.to_pass()[0].interrupted
    history.apply(as_event({"event": "run_started", "accept_change": False}))
    assert history.calls.to_pass()[0].left == ((0, 7), (1, 7))
    history.apply(as_event({"event": "run_started", "accept_change": True}))
    assert history.calls.to_pass()[0].left == ()


def test_the_calls_fit_into_an_environment_variable() -> None:
    """A long loop passes its newest ones."""
    records = [attempt(0), *(started(number) for number in range(1, 200))]
    passed = History.of(as_events(records)).calls.to_pass()
    assert [passed[0].ordinal, passed[-1].ordinal] == [200 - MAX_PASSED_CALLS, 199]


def test_a_call_that_starts_over_elsewhere_is_no_progress() -> None:
    """Otherwise a script with a random output directory would refill the restart budget for ever."""
    history = History.of(as_events([attempt(0), started(1), saved(1, 4)]))
    assert history.highest_checkpoint == (1, 4)
    for record in (
        attempt(1),
        started(2, replaces=1),
        saved(2, 4),
        attempt(2),
        started(3, replaces=2),
        saved(3, 3),
    ):
        history.apply(as_event(record))
    assert history.highest_checkpoint == (1, 4)
    history.apply(as_event(saved(3, 5)))
    assert history.highest_checkpoint == (1, 5)


def test_a_mismatch_is_counted_and_kept_with_the_recovery() -> None:
    """The incident report shows it."""
    incident = {"event": "incident", "cause": "signal", "step": 4}
    chosen = {"event": "resume_chosen", "rank": 0, "step": 0, "mismatch": "starts from step 0"}
    history = History.of(as_events([attempt(0), started(1), incident, attempt(1), chosen]))
    assert history.resume_mismatches == 1
    assert history.recoveries[0].mismatch == "starts from step 0"
    history.apply(as_event({**chosen, "mismatch": None}))
    assert history.resume_mismatches == 1


def ended(call: int, step: int, code: int = 0) -> list[dict[str, Any]]:
    """Return the events of a call's end and of the run's."""
    finish = {"event": "train_ended", "time": 5.0, "rank": 0, "train_call": call, "step": step}
    return [finish, {"event": "run_ended", "time": 6.0, "exit_code": code, "completed": True}]


def test_a_call_that_the_script_ended_before_its_last_step_is_reopened_by_the_next_launch() -> None:
    """Until something newer of it is saved. Only the last call counts, and only if the script had ended."""
    first = [attempt(0), started(1, target_steps=20), saved(1, 8), *ended(1, 8)]
    again = [{"event": "run_started", "time": 7.0, "run": "r"}, attempt(1)]
    early = History.of(as_events(first))
    assert early.ended_early is not None
    assert early.ended_early.progress == "step 8 of 20"
    assert History.of(as_events([*first, *again])).calls.to_pass()[0].reopened
    assert History.of(as_events([*first, *again, started(1, 8, target_steps=20)])).calls.to_pass()[0].reopened
    more = [*first, *again, started(1, 8, target_steps=20), saved(1, 12)]
    assert not History.of(as_events(more)).calls.to_pass()[0].reopened
    assert History.of(as_events([*more, *ended(1, 20)])).ended_early is None
    stopped = [attempt(0), started(1, target_steps=20), *ended(1, 8, code=75)]
    assert History.of(as_events(stopped)).ended_early is None
    other_last = [*first[:-1], started(2, target_steps=4), *ended(2, 4)]
    assert History.of(as_events(other_last)).ended_early is None
