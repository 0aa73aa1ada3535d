"""Which injections can happen in a run, and which remain after some have fired."""

from __future__ import annotations

import pytest

from grpo_run.runtime.errors import ConfigError
from grpo_run.runtime.launch.injections import armed, check, parse_all, parse_injection, remaining


@pytest.mark.parametrize(
    ("text", "world_size", "says"),
    [
        ("kill@rank2:step7", 2, "there is no rank 2; ranks are 0 to 1"),
        ("kill@rank1:step7", 1, "the only rank is 0"),
        ("extra@rank0:step7", 1, "extra needs at least 2 ranks"),
        ("skip@rank0:step7", 1, "skip needs at least 2 ranks"),
    ],
)
def test_an_injection_that_cannot_happen_is_refused(text: str, world_size: int, says: str) -> None:
    """The rank does not exist, or a collective fault has no second rank."""
    with pytest.raises(ConfigError, match=says):
        check(parse_all([text]), world_size)


def test_every_existing_rank_is_accepted() -> None:
    """The last rank is accepted too."""
    check(parse_all(["kill@rank1:step7", "skip@rank0:step7", "hang@rank1:step7"]), 2)


def test_fired_injections_do_not_remain() -> None:
    """They are identified by canonical text; the order is kept."""
    injections = parse_all(["kill@rank1:step7", "hang@rank0:step2:seconds=5", "hang@rank0:step2"])
    left = remaining(injections, {"hang@rank0:step2:seconds=5", "kill@rank9:step7"})
    assert [str(injection) for injection in left] == ["kill@rank1:step7", "hang@rank0:step2"]
    assert remaining(injections, ()) == injections
    assert remaining(injections, {str(injection) for injection in injections}) == ()


def test_memory_that_never_suffices_fires_in_every_attempt() -> None:
    """As long as too many rows are computed at once; without rows it happens once."""
    once, rows = parse_all(["oom@rank1:step3:phase=backward", "oom@rank1:step3:phase=forward:rows=2"])
    assert armed((once, rows), [str(once), str(rows)]) == (rows,)
    assert armed((once, rows), []) == (once, rows)
    assert remaining((once, rows), [str(once), str(rows)]) == ()
    assert parse_injection("oom@rank1:step3:tokens=9").recurs
