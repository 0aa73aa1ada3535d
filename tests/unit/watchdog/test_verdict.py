"""The verdict and its JSON."""

from __future__ import annotations

from typing import Any

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


def test_the_json_has_the_documented_keys() -> None:
    """`verdict.json` has every documented key."""
    contract = "schema cause culprits phase step confidence sentence location waiters mismatch tried advice"
    assert set(contract.split()) <= set(make_verdict().as_json())
