"""A repeated failure has the same signature, and another kind of failure another."""

from __future__ import annotations

import signal

import pytest
from support.builders.watchdog.failed_ranks import diagnose, make_error, make_exit
from support.builders.watchdog.slots import make_slot


@pytest.mark.parametrize(
    ("first", "second", "same"), [({"step": 7}, {"step": 7}, True), ({"step": 7}, {"step": 8}, False)]
)
def test_the_signature_identifies_a_repeated_failure(
    first: dict[str, int], second: dict[str, int], same: bool
) -> None:
    """The same error at the same line and step is the same failure; at another step it is not."""
    signatures = {
        diagnose(make_exit(0, error=make_error(wall_time=at)), slots={0: make_slot(0, **changes)}).signature
        for at, changes in ((1.0, first), (2.0, second))
    }
    assert len(signatures) == (1 if same else 2)


def test_signatures_tell_kinds_of_failure_apart() -> None:
    """A restart compares them to see whether a failure repeats."""

    def signature(**exit: object) -> str:
        return diagnose(make_exit(0, **exit)).signature

    assert signature(signal=signal.SIGSEGV).startswith(f"signal:{int(signal.SIGSEGV)}:")
    assert signature(error=make_error(type="KeyError", location=None)) == "KeyError@?:0:step7"
    assert signature(error=make_error(type="KeyError", location=("a.py", 3, "f"))) == "KeyError@a.py:3:step7"
    assert signature(error=None, exit_code=5) == "exit:5:step7"
