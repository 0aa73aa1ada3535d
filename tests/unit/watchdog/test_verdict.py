"""The verdict and its JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest

from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.verdict import Location, Verdict


def make_verdict(**changes: Any) -> Verdict:
    """A proved exception on rank 1."""
    fields: dict[str, Any] = {
        "cause": Cause.exception, "culprits": (1,), "step": 7, "phase": "reward", "confidence": "proved",
        "sentence": "Rank 1 raised KeyError in step 8 (phase reward): 'x'",
        "signature": "KeyError@t.py:3:step7",
        "deterministic": True, "location": Location(file="t.py", line=3, function="reward"),
        "waiters": (0, 2),
    }  # fmt: skip
    return Verdict(**(fields | changes))


@pytest.mark.parametrize(("culprits", "one"), [((), None), ((3,), 3), ((1, 2), None)])
def test_the_culprit_is_set_if_there_is_exactly_one(culprits: tuple[int, ...], one: int | None) -> None:
    """It is None with several culprits or none."""
    assert make_verdict(culprits=culprits).culprit == one


def test_the_json_has_the_documented_keys() -> None:
    """`verdict.json` has every documented key."""
    contract = "schema cause culprits phase step confidence sentence location waiters mismatch tried advice"
    assert set(contract.split()) <= set(make_verdict().as_json())


def test_the_json_survives_a_round_trip() -> None:
    """Encoding and decoding change nothing."""
    value = make_verdict().as_json()
    assert json.loads(json.dumps(value)) == value
    assert value["cause"] == "exception"
    assert value["location"] == {"file": "t.py", "line": 3, "function": "reward"}


def test_an_unknown_location_is_null() -> None:
    """No file is invented."""
    assert make_verdict(location=None).as_json()["location"] is None
