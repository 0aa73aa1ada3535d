"""Two assumptions together: only pairs that both members bring closer. Nothing is traced."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from support.predictions import GIB, a_prediction

from grpo_run.runtime.planning.explaining import Explanation, together
from grpo_run.runtime.planning.job import Job

BASE = a_prediction().allocated_bytes / GIB


class Never:
    """Stands for a predictor that must not be asked."""

    def predict(self, job: Job) -> Any:
        """Fail."""
        raise AssertionError("nothing has to be traced")


def _alone(name: str, above: float, **more: Any) -> Explanation:
    return Explanation(
        name=name, assumption=name, arithmetic=(), allocated_bytes=(BASE + above) * GIB, combines=True, **more
    )


def _names(alone: list[Explanation], observed: float, predictor: Any = None) -> list[str]:
    found = together(predictor or Never(), a_prediction(), alone, (BASE + observed) * GIB)
    return [one.name for one in found]


@pytest.mark.parametrize(
    ("alone", "observed", "found"), [((10, 8), 18, ["a+b"]), ((18, -1), 18, []), ((10, 8), 100, [])]
)
def test_a_pair_accounts_for_it_if_it_is_close_and_both_members_contribute(
    alone: tuple[float, float], observed: float, found: list[str]
) -> None:
    """GiB on top; one of them alone must not be as close."""
    assert _names([_alone("a", alone[0]), _alone("b", alone[1])], observed) == found


def test_what_stands_for_itself_is_not_combined() -> None:
    """Such as the job as it is described."""
    described = Explanation(name="as-described", assumption="", arithmetic=(), allocated_bytes=10 * GIB)
    assert _names([described, _alone("b", 8)], 18) == []


def test_two_changes_of_a_job_are_predicted_together() -> None:
    """They may need more than their sum, as longer rows with stored attention matrices do."""

    class Multiplies:
        asked: ClassVar[list[Job]] = []

        def predict(self, job: Job) -> Any:
            """Return a job that needs 30 GiB more."""
            self.asked.append(job)
            phase = a_prediction().phases["backward"]
            more = type(phase)(
                traced={"activations": (BASE + 30) * GIB},
                allocated_bytes=(BASE + 30) * GIB,
                low_bytes=0.0,
                high_bytes=0.0,
            )
            return a_prediction(phases={"backward": more})

    alone = [
        _alone("long", 10, changes={"completion": 4096}),
        _alone("eager", 8, changes={"attention": "eager"}),
    ]
    predictor = Multiplies()
    assert _names(alone, 30, predictor) == ["long+eager"]
    assert (predictor.asked[0].completion, predictor.asked[0].attention) == (4096, "eager")
