"""When a run whose scripts have ended has finished, and why it has not."""

from __future__ import annotations

import pytest
from support.builders.runtime.failure_stories import history
from support.builders.watchdog.slots import make_slot

from grpo_run.runtime.history.history import History
from grpo_run.runtime.supervisor.policy import has_finished, why_not_finished
from grpo_run.watchdog.observation import RankState

LEFT_OUT = "train() call 1 was interrupted, and the script ended without continuing it."


@pytest.mark.parametrize(
    ("unsaved", "refused", "left_out", "expected"),
    [
        ("", "", "", ""),
        ("", "", LEFT_OUT, f"{LEFT_OUT} --require-resume is set."),
        ("", "it may not.", LEFT_OUT, "The script ran to its end at step 6, but it may not."),
        ("it is lost.", "it may not.", LEFT_OUT, "The script ran to its end at step 6, but it is lost."),
    ],
)
def test_the_first_reason_ends_the_run(unsaved: str, refused: str, left_out: str, expected: str) -> None:
    """What is lost comes before what the user has asked for."""
    found = why_not_finished(History(step=6), unsaved=unsaved, refused=refused, left_out=left_out)
    assert found == expected


@pytest.mark.parametrize(
    ("states", "earlier", "finished"),
    [
        ([RankState.done, RankState.done], [], True),
        ([RankState.done, RankState.returned], [], False),
        ([RankState.done, RankState.returned], ["thread"], True),
        ([RankState.done, RankState.returned], ["another"], False),
        ([RankState.training, RankState.returned], ["thread"], False),
        ([], ["thread"], False),
    ],
)
def test_a_run_has_finished_if_what_still_hangs_has_hung_before(
    states: list[RankState], earlier: list[str], finished: bool
) -> None:
    """As with a thread that the script has left behind, and only after every last line."""
    slots = [make_slot(rank, state=state) for rank, state in enumerate(states)]
    assert has_finished(slots, history([*(f"!{name}" for name in earlier), "!thread"]), "thread") is finished
