"""What the other ranks do meanwhile: the same calls, until one rank deviates."""

from __future__ import annotations

import pytest
from support.builders.trainers.injections import InjectedRank, Log

pytestmark = pytest.mark.usefixtures("logged_faults")


@pytest.mark.parametrize("kind", ["mismatch-operation", "mismatch-shape", "skip"])
@pytest.mark.parametrize("phase", ["reward", "forward_backward", "vote"])
def test_all_ranks_make_the_same_calls_until_one_deviates(log: Log, kind: str, phase: str) -> None:
    """Once per step from the second step on, and not after the deviation."""
    text = f"{kind}@rank1:step5" + (f":phase={phase}" if phase != "forward_backward" else "")
    InjectedRank(log, text, rank=0).steps(1, 8)
    assert log.lines == ["common on 0"] * 4  # steps 2, 3, 4, and 5 where rank 1 departs
    log.lines.clear()
    InjectedRank(log, text, rank=1).steps(1, 8)
    assert log.lines == [*["common on 1"] * 3, "journaled", "on disk", f"{text} on 1"]


@pytest.mark.parametrize("step", [1, 2])
def test_an_early_deviation_has_no_earlier_calls(log: Log, step: int) -> None:
    """Without them, the deviating rank cannot be identified."""
    InjectedRank(log, f"skip@rank1:step{step}", rank=0).steps(1, 6)
    assert log.lines == ["common on 0"]


def test_ranks_make_equally_many_calls_with_several_deviations(log: Log) -> None:
    """Deviations in one phase share their common collectives.

    Otherwise a rank would hang without any fault.
    """
    texts = ["mismatch-shape@rank1:step4", "skip@rank0:step6"]
    calls = []
    for rank in (0, 1, 2):
        log.lines.clear()
        InjectedRank(log, *texts, rank=rank).steps(1, 8)
        calls.append(sum("common" in line or "mismatch" in line for line in log.lines))
    assert calls == [4, 5, 5]  # steps 2 to 6; rank 0 leaves the last one out


@pytest.mark.parametrize("rank", [0, 1])
def test_a_step_with_a_deviation_has_no_second_call(log: Log, rank: int) -> None:
    """A call at a later entry of the phase would be attributed to the wrong rank."""
    texts = ["skip@rank1:step5:phase=reward", "skip@rank1:step7:phase=reward"]
    InjectedRank(log, *texts, rank=rank).steps(5, 5)
    assert [line for line in log.lines if "common" in line] == ["common on 0"] * (rank == 0)


def test_ranks_agree_on_what_has_fired(log: Log) -> None:
    """One rank that knows it from its node's journal is enough. All ranks vote in the same order."""
    asked: list[int] = []

    def other_rank_knows_the_second(number: int) -> int:
        asked.append(number)
        return max(number, [0, 1, 0][len(asked) - 1])

    rank = InjectedRank(log, "skip@rank0:step5", "skip@rank0:step6", "slow@rank1:step4")
    rank.maximum = other_rank_knows_the_second
    with rank.call():
        assert asked == [0, 0, 0]
        rank.steps(1, 8)
    assert [line for line in log.lines if "common" in line] == ["common on 1"] * 4
    asked_again: list[int] = []
    rank.maximum = lambda number: (asked_again.append(number), number)[1]
    rank.call().__enter__()
    assert asked_again == [1, 1, 1]
