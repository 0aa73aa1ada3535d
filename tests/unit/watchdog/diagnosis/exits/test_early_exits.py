"""A rank that ends while others train is reported with its line."""

from __future__ import annotations

from support.builders.watchdog.failed_ranks import diagnose, make_error, make_exit
from support.builders.watchdog.slots import make_slot

from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.diagnosis.exits import diagnose_early_exit
from grpo_run.watchdog.observation import RankState, all_done


def test_a_run_is_done_when_every_rank_is() -> None:
    """One rank that is not done, or cannot be read, is enough to be not done."""
    done = make_slot(0, state=RankState.done)
    assert all_done([done, done])
    assert not all_done([done, make_slot(1)])
    assert not all_done([done, None])
    assert not all_done([])


def test_an_early_exit_is_reported_with_its_line() -> None:
    """The sentence names a rank that was still training."""
    error = make_error(type="SystemExit", message="0", location=("/home/user/train.py", 40, "main"))
    left = [make_exit(1, exit_code=0, order=0, error=error, completed=True)]
    verdict = diagnose_early_exit(left, [make_exit(0, order=1)], {0: make_slot(0), 1: make_slot(1)})
    assert (verdict.cause, verdict.culprits, verdict.waiters) == (Cause.rank_exited_early, (1,), (0,))
    assert verdict.sentence == (
        "Rank 1 exited in step 8 (phase generate), at train.py:40 in main, while rank 0 was still training."
    )
    assert verdict.location is not None
    assert verdict.location.line == 40
    assert (verdict.confidence, verdict.deterministic) == ("proved", True)


def test_all_ranks_that_exited_early_are_named() -> None:
    """In ascending order; the first to exit gives the line; slots may be missing."""
    late = make_exit(0, exit_code=0, order=2, error=make_error(location=("late.py", 2, "f")))
    first = make_exit(3, exit_code=0, order=0, error=make_error(location=("first.py", 1, "f")))
    slots = {0: None, 1: make_slot(1, step=9), 2: None, 3: None}
    verdict = diagnose_early_exit([late, first], [make_exit(2, order=1), make_exit(1, order=3)], slots)
    assert (verdict.culprits, verdict.waiters, verdict.step) == ((0, 3), (1, 2), 9)
    assert verdict.sentence.startswith("Ranks 0 and 3 exited after step 9, at first.py:1 in f, while rank 1 ")
    assert verdict.phase is None


def test_a_repeated_early_exit_has_the_same_signature() -> None:
    """It consists of ranks and step, with or without a line."""
    failed = [make_exit(0, order=1)]
    first = diagnose_early_exit([make_exit(1, exit_code=0)], failed, {0: make_slot(0)})
    assert first.location is None
    assert (
        diagnose_early_exit([make_exit(1, exit_code=0)], failed, {0: make_slot(0)}).signature
        == first.signature
    )
    assert (
        diagnose_early_exit([make_exit(1, exit_code=0)], failed, {0: make_slot(0, step=8)}).signature
        != first.signature
    )
    assert (
        diagnose_early_exit([make_exit(2, exit_code=0)], failed, {0: make_slot(0)}).signature
        != first.signature
    )


def test_a_rank_that_exits_with_code_zero_has_left_early() -> None:
    """The advice says how training is ended early; no other code gets it."""
    verdict = diagnose(make_exit(0, exit_code=0))
    assert verdict.cause is Cause.rank_exited_early
    assert any("should_training_stop" in line for line in verdict.advice)
    for code in (-1, 1, 3):
        other = diagnose(make_exit(0, exit_code=code))
        assert other.cause is Cause.exception
        assert not other.advice
