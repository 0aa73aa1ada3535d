"""Two assumptions together: only pairs that both members bring closer. Nothing is traced."""

from __future__ import annotations

from typing import Any, ClassVar

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


def test_a_pair_that_accounts_for_it_is_found() -> None:
    """10 and 8 GiB on top, 18 observed."""
    assert _names([_alone("a", 10), _alone("b", 8)], 18) == ["a+b"]


def test_a_member_that_contributes_nothing_is_no_pair() -> None:
    """One of them alone is as close."""
    assert _names([_alone("a", 18), _alone("b", -1)], 18) == []


def test_a_pair_far_away_is_not_returned() -> None:
    """However it compares with other pairs."""
    assert _names([_alone("a", 10), _alone("b", 8)], 100) == []


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
