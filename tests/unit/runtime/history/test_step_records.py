"""Of two records of a step, the first thing that differs is named, in the order in which it is computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from grpo_run.runtime.history import step_records
from grpo_run.runtime.history.step_records import (
    LOSS,
    TENSORS,
    Difference,
    Sample,
    StepRecord,
    first_difference,
)

ONE, TWO = "0" * 15 + "1", "0" * 15 + "2"
RECORD = StepRecord(
    train_call=1,
    step=7,
    samples=[Sample("p0", "c0", {"right": (1.0).hex(), "short": "nan"}), Sample("p1", "c1")],
    loss=(0.1).hex(),
    grad_norm=(2.5).hex(),
    names=["first", "second"],
    digests=ONE + TWO,
)
CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"digests": ONE + ONE}, "tensor second"),
    ({"grad_norm": (2.5000000000000004).hex(), "digests": ONE + ONE}, "gradient norm"),
    ({"loss": "-0x1p-3", "grad_norm": "inf"}, "loss"),
    ({"samples": [RECORD.samples[0], Sample("p1", "x")], "loss": "inf"}, "completion of sample 1"),
    ({"samples": [Sample("x", "x"), RECORD.samples[1]]}, "prompt of sample 0"),
    ({"samples": [Sample("p0", "c0", {"right": "0x0p+0"}), RECORD.samples[1]]}, "reward right of sample 0"),
    ({"samples": RECORD.samples[:1]}, "number of samples"),
]


@pytest.mark.parametrize(("change", "name"), CHANGES)
def test_the_first_difference_is_named(change: dict[str, Any], name: str) -> None:
    """Whatever follows from it."""
    found = first_difference(RECORD, msgspec.structs.replace(RECORD, **change))
    assert found is not None
    assert found.name == name


def test_equal_records_have_none() -> None:
    """A value that is not a number equals itself, and what was not recorded is not compared."""
    assert first_difference(RECORD, RECORD) is None
    assert first_difference(msgspec.structs.replace(RECORD, loss=None), RECORD) is None


def test_both_values_are_shown_with_every_bit() -> None:
    """Neighbouring numbers are told apart."""
    other = msgspec.structs.replace(RECORD, loss=(0.1 + 2**-56).hex())
    assert first_difference(RECORD, other) == Difference("loss", "0.1", "0.10000000000000002", LOSS)


def test_what_a_replay_has_loaded_is_compared_by_its_tensors() -> None:
    """It has not computed the step itself."""
    loaded = StepRecord(train_call=1, step=7, names=["first", "second"], digests=ONE + ONE, starts=True)
    found = first_difference(RECORD, loaded)
    assert found == Difference("tensor second", f"digest {TWO}", f"digest {ONE}", TENSORS)


def test_names_are_written_once_and_the_last_record_of_a_step_counts(tmp_path: Path) -> None:
    """A step is done again after a fault. A line that a kill has cut costs no other."""
    file = tmp_path / "steps" / "rank1.jsonl"
    step_records.append(file, RECORD)
    with open(file, "ab") as end:
        end.write(b'{"train_call":1,"st')
    step_records.append(file, msgspec.structs.replace(RECORD, names=None, loss=(0.5).hex()))
    assert step_records.ranks(tmp_path / "steps") == [1]
    (found,) = step_records.read(tmp_path / "steps", 1).values()
    assert (found.loss, found.tensors()) == ((0.5).hex(), {"first": ONE, "second": TWO})


def test_a_file_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last full file is kept, and the new one begins with names."""
    monkeypatch.setattr(step_records, "MAX_FILE_BYTES", 600)
    file, names = tmp_path / "steps" / "rank0.jsonl", RECORD.names
    for step in range(9):
        record = msgspec.structs.replace(RECORD, step=step, names=names)
        names = RECORD.names if step_records.append(file, record) else None
    found = step_records.read(file.parent, 0)
    assert 2 <= len(found) < 9
    assert (1, 8) in found
    assert all(one.tensors() == RECORD.tensors() for one in found.values())
