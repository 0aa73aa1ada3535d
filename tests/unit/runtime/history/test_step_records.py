"""Records of steps are read as they were written, also from a file that a kill has cut."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from grpo_run.runtime.history import step_records
from grpo_run.runtime.history.step_records import Sample, StepRecord

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
