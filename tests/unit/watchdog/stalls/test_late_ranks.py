"""Why a rank is late: only what its work and that of the others prove."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from grpo_run.watchdog.observation import Phase, Slot
from grpo_run.watchdog.stalls.late_ranks import Blame, ReadingOrder, Straggler, explain

MakeSlot = Callable[..., Slot]


def blame(
    make_slot: MakeSlot,
    phase: Phase,
    *,
    more: float = 1.0,
    ratio: float = 2.0,
    order: ReadingOrder = ReadingOrder.shuffled,
    others: tuple[Phase, ...] = (),
) -> tuple[Blame, str]:
    """The blame of rank 1, which takes `ratio` times as long and does `more` times as much as ranks 0 and 2."""
    slots: dict[int, Slot | None] = {
        rank: make_slot(
            rank,
            generation_passes=int(1000 * (more if rank == 1 else 1)),
            tokens_generated=int(50_000 * (more if rank == 1 else 1)),
        )
        for rank in range(3)
    }
    late = [
        Straggler(rank=1, phase=one, median_seconds=ratio, others_seconds=1.0) for one in (phase, *others)
    ]
    found = explain(late, slots, order)[0]
    return found.blame, found.sentence


def test_longer_completions_of_data_in_order_are_the_order(make_slot: MakeSlot) -> None:
    """The data set is not shuffled, and the late rank generates twice as much."""
    for phase in (Phase.generate, Phase.reward):
        found, sentence = blame(make_slot, phase, more=2.0, order=ReadingOrder.sorted_by_length)
        assert found is Blame.data_order
        assert "2.0 times as often" in sentence
        assert "sorted by length and not shuffled" in sentence


@pytest.mark.parametrize("order", [ReadingOrder.shuffled, ReadingOrder.unknown])
def test_longer_completions_of_shuffled_data_are_unknown(make_slot: MakeSlot, order: ReadingOrder) -> None:
    """The order cannot be to blame, and nothing else is proved."""
    assert blame(make_slot, Phase.generate, more=2.0, order=order)[0] is Blame.unknown


def test_the_same_work_in_more_time_is_the_hardware(make_slot: MakeSlot) -> None:
    """In generation, whatever the order of the data."""
    for order in ReadingOrder:
        assert blame(make_slot, Phase.generate, more=1.05, order=order)[0] is Blame.hardware


def test_a_slow_reward_alone_is_unknown(make_slot: MakeSlot) -> None:
    """A prompt, a service or the machine; if the optimizer is slow too, it is the machine."""
    assert blame(make_slot, Phase.reward, order=ReadingOrder.kept)[0] is Blame.unknown
    assert blame(make_slot, Phase.reward, others=(Phase.optimizer,))[0] is Blame.hardware


def test_a_little_more_work_explains_only_a_little(make_slot: MakeSlot) -> None:
    """1.3 times the work in 3 times the time."""
    assert blame(make_slot, Phase.generate, more=1.3, ratio=3.0, order=ReadingOrder.kept)[0] is Blame.unknown


def test_phases_without_data_are_the_hardware_and_data_is_unknown(make_slot: MakeSlot) -> None:
    """An optimizer does the same on every rank; a loader may be slow for many reasons."""
    assert blame(make_slot, Phase.optimizer)[0] is Blame.hardware
    assert blame(make_slot, Phase.data, order=ReadingOrder.kept)[0] is Blame.unknown


def test_work_that_is_not_counted_proves_nothing(make_slot: MakeSlot) -> None:
    """Another engine generates."""
    slots: dict[int, Slot | None] = {rank: make_slot(rank, generation_passes=0) for rank in range(2)}
    late = [Straggler(rank=1, phase=Phase.generate, median_seconds=2.0, others_seconds=1.0)]
    (found,) = explain(late, slots, ReadingOrder.kept)
    assert found.blame is Blame.unknown
    assert explain(late, {0: None, 1: slots[1]}, ReadingOrder.kept)[0].blame is Blame.unknown


@pytest.mark.parametrize(
    ("phase", "work", "ratio", "order", "others", "cause"),
    [
        (Phase.optimizer, 3.0, 2.0, ReadingOrder.kept, (), "hardware: optimizer does the same on every rank"),
        (Phase.checkpoint, 3.0, 2.0, ReadingOrder.kept, (), "hardware: checkpoint does the same on every rank"),
        (
            Phase.data, 3.0, 2.0, ReadingOrder.kept, (Phase.optimizer,),
            "unknown: it waits for its data; its shard, its loader or its disk may be slow",
        ),
        (
            Phase.generate, 1.15, 2.0, ReadingOrder.kept, (),
            "hardware: it runs the model as often as the others, but takes longer for each",
        ),
        (
            Phase.reward, 1.15, 2.0, ReadingOrder.kept, (Phase.optimizer,),
            "hardware: it scores a token as often as the others, but takes longer for each",
        ),
        (
            Phase.forward_backward, 1.0, 2.0, ReadingOrder.kept, (),
            "unknown: its completions are as long as those of the others; a prompt, a service or the machine may be slow",
        ),
        (
            Phase.generate, 1.6, 2.0, ReadingOrder.kept, (),
            "data order: it runs the model 1.6 times as often, and the data set is not shuffled",
        ),
        (
            Phase.reward, 1.6, 2.0, ReadingOrder.sorted_by_length, (),
            "data order: it scores a token 1.6 times as often, and the data set is sorted by length and not shuffled",
        ),
        (Phase.generate, 1.598, 2.0, ReadingOrder.kept, (), "unknown: it runs the model 1.6 times as often as the others"),
        (Phase.generate, 1.16, 1.4, ReadingOrder.kept, (), "data order: it runs the model 1.2 times as often, and the data set is not shuffled"),
        (Phase.generate, 1.6, 2.0, ReadingOrder.unknown, (), "unknown: it runs the model 1.6 times as often as the others"),
        (
            Phase.generate, 1.6, 2.0, ReadingOrder.shuffled, (),
            "unknown: it runs the model 1.6 times as often as the others, although the data set is shuffled",
        ),
    ],
)  # fmt: skip
def test_the_sentence_names_the_cause_and_what_shows_it(
    make_slot: MakeSlot,
    phase: Phase,
    work: float,
    ratio: float,
    order: ReadingOrder,
    others: tuple[Phase, ...],
    cause: str,
) -> None:
    """Every reason, and the work that just is the same or just explains the time."""
    _, sentence = blame(make_slot, phase, more=work, ratio=ratio, order=order, others=others)
    assert sentence == (
        f"rank 1 takes {ratio:.1f} times as long in {phase.name} as the others ({ratio:.2f} s against 1.00 s); cause: {cause}"
    )


def test_work_is_compared_with_the_middle_of_the_others(make_slot: MakeSlot) -> None:
    """Ranks before and after it count, its own work does not, and one rank that is not counted prevents the comparison."""
    late = [Straggler(rank=1, phase=Phase.generate, median_seconds=3.0, others_seconds=1.0)]

    def sentence(*passes: int) -> str:
        slots: dict[int, Slot | None] = {
            rank: make_slot(rank, generation_passes=count) for rank, count in enumerate(passes)
        }
        return explain(late, slots, ReadingOrder.kept)[0].sentence

    assert "3.0 times as often" in sentence(100, 300)
    assert "3.0 times as often" in sentence(100, 300, 100, 900)
    assert "2.0 times as often" in sentence(100, 600, 300, 500)
    for passes in ((100, 0, 100), (0, 300, 100), (100, 300, 0)):
        assert "cannot be compared" in sentence(*passes)
    assert (
        "cannot be compared"
        in explain(late, {1: make_slot(1, generation_passes=5)}, ReadingOrder.kept)[0].sentence
    )


def test_the_status_has_the_late_rank_as_numbers(make_slot: MakeSlot) -> None:
    """For `grpo-run status --json`."""
    late = [Straggler(rank=1, phase=Phase.optimizer, median_seconds=2.346, others_seconds=1.0)]
    (found,) = explain(late, {}, ReadingOrder.kept)
    assert found.as_json() == {
        "rank": 1, "phase": "optimizer", "ratio": 2.35, "cause": "hardware", "sentence": found.sentence,
    }  # fmt: skip
    with pytest.raises(AttributeError):
        found.reason = "another"  # type: ignore[misc]
