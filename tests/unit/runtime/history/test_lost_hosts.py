"""A host whose supervisor was killed says so at the end of a run over several hosts."""

from __future__ import annotations

import pytest
from support.journal import as_events

from grpo_run.runtime.history.history import History
from grpo_run.runtime.history.summary import summarize


def _history(*, world_size: int, ended: bool) -> History:
    begin = {"event": "run_started", "world_size_local": 1}
    end = [{"event": "run_ended", "exit_code": 75}] if ended else []
    trained = {"event": "step_committed", "step": 3, "train_call": 1, "target_steps": 9}
    started = {"event": "attempt_started", "attempt": 0, "world_size": world_size, "node": 1}
    story = [begin, started, trained, *end, begin, {**started, "attempt": 1}, {**trained, "step": 9}]
    return History.of(as_events([{"time": 1.0 + at, **event} for at, event in enumerate(story)]))


@pytest.mark.parametrize(
    ("world_size", "ended", "said"),
    [(2, False, "this host lost 1 time"), (2, True, "no faults"), (1, False, "no faults")],
)
def test_a_killed_supervisor_is_no_run_without_faults(world_size: int, ended: bool, said: str) -> None:
    """It wrote no incident itself. Alone, it is what it was: nothing waited for it."""
    made = _history(world_size=world_size, ended=ended)
    assert summarize("finished", made, 0) == f"Finished at step 9 of 9, {said}."
