"""The log history of snapshots: what a trainer has logged, written once.

    <staging area>/log-history/5f1c…              a segment: entries of all snapshots that refer to it
    slot0/LOG_HISTORY.tail                        the entries after the last segment that is full
    slot0/LOG_HISTORY.json                        the segments of this snapshot, and at last its tail
    slot0/files/checkpoint-7/trainer_state.json   as transformers writes it, with an empty history

Transformers keeps every log entry and writes all of them into each checkpoint. After 100,000 steps that takes
seconds, so a snapshot refers to what is written already. Its checkpoint on disk has the file that
transformers would have written (`composed`). A segment is a list of entries in Python's marshal format, which
is read four times as fast as JSON. Rank 0 writes segments (`runtime/rank/saving/_log_history.py`); the drain
worker and ranks that resume read them. Does not check them: a slot checks their sizes (`slot.py`).
"""

from __future__ import annotations

import dataclasses
import json
import marshal
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pydantic

from grpo_run.runtime.errors import CheckpointError

SEGMENTS = "log-history"
LOG_HISTORY = "LOG_HISTORY.json"
TAIL = "LOG_HISTORY.tail"
_MARSHAL_VERSION = 4
"""The version that every supported Python reads."""
_PLAIN_TYPES = frozenset({float, int, str, bool, type(None)})
"""Types whose values JSON gives back as they were."""
_EMPTY_HISTORY = b'\n  "log_history": [],\n'
"""In a state's file. Strings in JSON have no line breaks, so it is nowhere else."""
_FLAT_ENTRY = json.JSONEncoder(separators=(",\n      ", ": "))
"""Written in C, unlike JSON with `indent`."""
_INDENT_BYTES = 13
"""What surrounds the name and the value of a field in a state's file."""
_ENTRIES_AT_ONCE = 1000


class Segment(pydantic.BaseModel):
    """Entries that follow one another.

    Attributes:
        path: of the file, relative to the staging area.
        text_bytes: about their size in `trainer_state.json`.
        size_bytes: of the file.
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")
    path: str
    text_bytes: int
    size_bytes: int


_SEGMENTS = pydantic.TypeAdapter(tuple[Segment, ...])


def read_segments(slot: Path) -> tuple[Segment, ...]:
    """Return the segments of the snapshot in a slot; none if its state has its history.

    Raises:
        CheckpointError: the record is not valid.
        OSError: it cannot be read.
    """
    try:
        return _SEGMENTS.validate_json((slot / LOG_HISTORY).read_bytes())
    except FileNotFoundError:
        return ()
    except pydantic.ValidationError as error:
        raise CheckpointError(f"{slot / LOG_HISTORY}: {error.errors()[0]['msg']}") from error


def as_read_back(entry: Mapping[Any, Any]) -> dict[str, Any]:
    """Return an entry as it is read from the file that transformers writes, with its fields in that order.

    What JSON does not have, such as a tensor, becomes a number, a list or text: transformers would fail where
    the script saves, but a snapshot is not the script's.

    Raises:
        TypeError, ValueError, RecursionError: names cannot be sorted, or the entry contains itself.
    """
    if not _PLAIN_TYPES.issuperset(map(type, entry.values())) or not all(type(name) is str for name in entry):
        entry = json.loads(json.dumps(entry, sort_keys=True, default=_plain))
    else:
        entry = dict(sorted(entry.items()))
    # the same objects, because marshal writes each object once
    return {sys.intern(name): value for name, value in entry.items()}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return value.tolist() if hasattr(value, "tolist") else repr(value)


def pack(path: str, entries: list[dict[str, Any]]) -> tuple[Segment, bytes]:
    """Return the segment of entries that `as_read_back` has returned, and the contents of its file."""
    data = marshal.dumps(entries, _MARSHAL_VERSION)
    # a number and its name take 14 bytes; the number takes up to 24 characters
    text_bytes = 2 * len(data) + sum(len(name) + _INDENT_BYTES for entry in entries for name in entry)
    return Segment(path=path, text_bytes=text_bytes, size_bytes=len(data)), data


def read_entries(area: Path, segments: Iterable[Segment]) -> Iterator[list[dict[str, Any]]]:
    """Yield the entries of each segment.

    Args:
        area: the staging area.
        segments: of a snapshot that is complete.
    """
    for segment in segments:
        yield marshal.loads((area / segment.path).read_bytes())


def composed(state: bytes, segments: Iterable[list[dict[str, Any]]]) -> Iterator[bytes]:
    """Yield the parts of the file that transformers writes for a state with this history.

    Args:
        state: the file of the same state without history.
        segments: the entries of each segment.
    """
    head, found, tail = state.partition(_EMPTY_HISTORY)
    assert found, "the state was written without history"
    yield head + b'\n  "log_history": ['
    separator = "\n    "
    for entries in segments:
        for start in range(0, len(entries), _ENTRIES_AT_ONCE):
            part = entries[start : start + _ENTRIES_AT_ONCE]
            yield (separator + ",\n    ".join(map(_entry_text, part))).encode("ascii")
            separator = ",\n    "
    yield b"\n  ],\n" + tail


def _entry_text(entry: dict[str, Any]) -> str:
    if entry and _PLAIN_TYPES.issuperset(map(type, entry.values())):
        return "{\n      " + _FLAT_ENTRY.encode(entry)[1:-1] + "\n    }"
    return json.dumps(entry, indent=2).replace("\n", "\n    ")


def remove_unused(area: Path, used: Iterable[Segment]) -> None:
    """Delete the segments that no slot refers to, except `used`."""
    keep = {segment.path for segment in used}
    for record in area.glob(f"*/{LOG_HISTORY}"):
        with suppress(CheckpointError):  # that snapshot cannot be read without it
            keep |= {segment.path for segment in read_segments(record.parent)}
    for path in (area / SEGMENTS).iterdir():
        if str(path.relative_to(area)) not in keep:
            path.unlink(missing_ok=True)
