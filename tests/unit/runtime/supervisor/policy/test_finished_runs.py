"""When a run whose scripts have ended has finished, and why it has not."""

from __future__ import annotations

import pytest

from grpo_run.runtime.history.history import History
from grpo_run.runtime.supervisor.policy import why_not_finished

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
