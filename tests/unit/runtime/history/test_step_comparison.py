"""Of two records of a step, the first thing that differs is named, in the order in which it is computed.

A replay with other samples or rewards is shown beside the run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from grpo_run.runtime.history import step_records
from grpo_run.runtime.history.run_directory import RunDirectory
from grpo_run.runtime.history.step_comparison import (
    LOSS,
    TENSORS,
    CallRecords,
    Difference,
    changed_rows,
    compare,
    differences,
)
from grpo_run.runtime.history.step_records import Sample, Scored, StepRecord

ONE, TWO = "0" * 15 + "1", "0" * 15 + "2"
SAMPLES = [
    Sample("p0", "c0", {"right": (1.0).hex(), "short": "nan"}, number=4, advantage=(0.5).hex(), tokens="t0"),
    Sample("p0", "c1", {"right": (3.0).hex()}, number=5, advantage=(-0.5).hex(), tokens="t1"),
]
SCORED = [Scored("t1", ONE, (-2.0).hex()), Scored("t0", ONE, (-1.0).hex())]
RECORD = StepRecord(
    train_call=1,
    step=7,
    samples=SAMPLES,
    generations=2,
    scored=SCORED,
    loss=(0.1).hex(),
    grad_norm=(2.5).hex(),
    names=["first", "second"],
    digests=ONE + TWO,
)
OTHER_REWARD = msgspec.structs.replace(SAMPLES[0], rewards={"right": "0x0p+0"}, advantage=None)
OTHER_END = msgspec.structs.replace(SAMPLES[1], completion="x")
CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"digests": ONE + ONE}, "tensor second"),
    ({"grad_norm": (2.5000000000000004).hex(), "digests": ONE + ONE}, "gradient norm"),
    ({"loss": "-0x1p-3", "grad_norm": "inf"}, "loss"),
    (
        {"scored": [SCORED[0], Scored("t0", TWO, (-1.0).hex())], "loss": "inf"},
        "log-probabilities of sample 4",
    ),
    ({"scored": [Scored("x", TWO, "0x0p+0")]}, "log-probabilities of sample 5"),
    (
        {"samples": [SAMPLES[0], msgspec.structs.replace(SAMPLES[1], advantage="inf")], "scored": []},
        "advantage of sample 5",
    ),
    ({"samples": [OTHER_REWARD, SAMPLES[1]], "scored": []}, "reward right of sample 4"),
    ({"samples": [OTHER_REWARD, OTHER_END]}, "completion of sample 5"),
    ({"samples": [Sample("x", "x"), SAMPLES[1]]}, "prompt of sample 4"),
    ({"samples": RECORD.samples[:1]}, "number of samples"),
]


def changed(**fields: Any) -> StepRecord:
    """The record with other values."""
    return msgspec.structs.replace(RECORD, **fields)


def first_difference(recorded: StepRecord, replayed: StepRecord) -> Difference | None:
    """Return the first difference of two records."""
    return next(differences(recorded, replayed, recorded.samples), None)


@pytest.mark.parametrize(("change", "name"), CHANGES)
def test_the_first_difference_is_named(change: dict[str, Any], name: str) -> None:
    """Whatever follows from it: rollout, rewards, log-probabilities, loss, gradient norm, weights."""
    found = first_difference(RECORD, changed(**change))
    assert found is not None
    assert found.name == name


def test_equal_records_have_none() -> None:
    """A value that is not a number equals itself, and what was not recorded is not compared."""
    assert first_difference(RECORD, RECORD) is None
    assert first_difference(changed(loss=None, scored=[]), RECORD) is None


def test_both_values_are_shown_with_every_bit() -> None:
    """Neighbouring numbers are told apart."""
    other = changed(loss=(0.1 + 2**-56).hex())
    assert first_difference(RECORD, other) == Difference("loss", "0.1", "0.10000000000000002", LOSS)


def test_log_probabilities_of_an_unknown_sample_are_named_by_their_place() -> None:
    """Their sums and digests tell them apart."""
    found = next(differences(RECORD, changed(scored=[Scored("t1", TWO, (-2.0).hex())])))
    assert found.name == "log-probabilities of completion 0 of the batch"
    assert found.replayed == f"-2.0 in all (digest {TWO})"


def test_what_a_replay_has_loaded_is_compared_by_its_tensors() -> None:
    """It has not computed the step itself."""
    loaded = StepRecord(train_call=1, step=7, names=["first", "second"], digests=ONE + ONE, starts=True)
    found = first_difference(RECORD, loaded)
    assert found == Difference("tensor second", f"digest {TWO}", f"digest {ONE}", TENSORS)


def of(*ranks: StepRecord) -> CallRecords:
    """What a run has of a step by rank."""
    return CallRecords(ranks={rank: {7: one} for rank, one in enumerate(ranks)}, logged={})


def test_what_arises_first_in_a_step_is_named_whatever_the_rank() -> None:
    """A completion of rank 1 before a loss of rank 0."""
    other = changed(samples=[SAMPLES[0], OTHER_END])
    found = compare(of(RECORD, RECORD), of(changed(loss="inf"), other), range(6, 8))
    assert found.first is not None
    assert (found.step, found.first.name) == (7, "completion of sample 5 on rank 1")
    one_rank = compare(of(RECORD, RECORD), of(changed(loss="inf"), other), range(6, 8), rank=0)
    assert one_rank.first is not None
    assert one_rank.first.name == "loss on rank 0"


def test_a_changed_step_must_still_have_the_same_rollout() -> None:
    """Otherwise it answers another question; what follows from the change is no difference."""
    changes = changed(samples=[OTHER_REWARD, SAMPLES[1]], loss="inf", digests=ONE + ONE)
    assert compare(of(RECORD), of(changes), range(6, 8), changed_from=7).first is None
    other = changed(samples=[SAMPLES[0], OTHER_END])
    found = compare(of(RECORD), of(other), range(6, 8), changed_from=7).first
    assert found is not None
    assert found.name == "completion of sample 5 on rank 0"


def test_a_changed_step_is_shown_beside_the_run() -> None:
    """With the groups whose samples or rewards have changed, and what is not known as such."""
    after = changed(samples=[OTHER_REWARD, SAMPLES[1]], loss="nan", grad_norm=None)
    (_, recorded, replayed), *rows = changed_rows(of(RECORD), of(after), 7, 7, dropped={5})
    assert (recorded, str(replayed)) == (0.1, "nan")
    assert rows == [
        ("gradient norm", 2.5, "-"),
        ("reward right, mean", 2.0, 0.0),
        ("sample 4, reward right", 1.0, 0.0),
        ("sample 4, advantage", 0.5, "-"),
        ("sample 5, reward right", 3.0, 3.0),
        ("sample 5, advantage", -0.5, "left out"),
    ]
    assert [row[0] for row in changed_rows(of(RECORD), of(RECORD), 7, 7, dropped=())] == [
        "loss", "gradient norm", "reward right, mean", "reward short, mean",
    ]  # fmt: skip


def test_a_changed_step_of_a_run_without_records_is_shown_alone() -> None:
    """All groups where it is not known which have changed, and otherwise that of the samples."""
    nothing = CallRecords(ranks={}, logged={})
    rows = list(changed_rows(nothing, of(RECORD), 7, 7, dropped=()))
    assert rows[0] == ("loss", "-", 0.1)
    assert ("sample 5, reward right", "-", 3.0) in rows
    assert list(changed_rows(nothing, of(RECORD), 7, 7, dropped={5}))[-1] == (
        "sample 5, advantage", "-", "left out"
    )  # fmt: skip


def test_a_step_is_traced_to_the_rollout_that_it_trains_on(tmp_path: Path) -> None:
    """Which may be of an earlier step; another call of the run does not count."""
    run = RunDirectory(path=tmp_path)
    for record in (RECORD, changed(step=8, samples=[]), changed(step=9, train_call=2)):
        step_records.append(run.steps / "rank0.jsonl", record)
    found = CallRecords.read(run, 1)
    assert [found.rollout_step(step) for step in (6, 7, 8, 9)] == [None, 7, 7, 7]
    assert found.samples(7).keys() == {4, 5}
