"""The log history of snapshots: what a trainer has logged, written once.

    <staging area>/log-history/5f1c…              a segment: entries, to which rank 0 only appends
    slot0/LOG_HISTORY.json                        the segments of this snapshot, and how much it has of each
    slot0/files/checkpoint-7/trainer_state.json   as transformers writes it, with an empty history

Transformers keeps every log entry and writes all of them into each checkpoint. After 100,000 steps that takes
seconds, so a snapshot refers to what is written already. Its checkpoint on disk has the file that
transformers would have written (`composed`). A segment is a sequence of values in version 2 of Python's
marshal format, in which values can be concatenated: a list of field names, then a tuple of values for each
entry with these fields. Rank 0 writes segments (`runtime/rank/saving/log_history.py`); the drain worker and
ranks that resume read them.
"""

from __future__ import annotations

import json
import marshal
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pydantic
from blake3 import blake3

from grpo_run.runtime.errors import CheckpointError

SEGMENTS = "log-history"
LOG_HISTORY = "LOG_HISTORY.json"
_MARSHAL_VERSION = 2
"""Later versions refer to earlier values; earlier ones write floats as text."""
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
    """The first part of a segment's file.

    Attributes:
        name: of the file.
        values: how many values there are; `entries` of them are entries.
        size_bytes: their size; `text_bytes` is about their size in `trainer_state.json`.
        blake3: their digest.
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")
    name: str
    values: int = 0
    entries: int = 0
    size_bytes: int = 0
    text_bytes: int = 0
    blake3: str = ""


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


class Packed(NamedTuple):
    """Entries in the format of a segment. `fields` are those of the last entry."""

    data: bytes
    values: int
    text_bytes: int
    fields: tuple[str, ...] | None


def pack(entries: Iterable[Mapping[Any, Any]], fields: tuple[str, ...] | None) -> Packed:
    """Encode entries as JSON would give them back, in the order in which transformers writes their fields.

    Args:
        fields: of the entry before; None if there is none.

    Raises:
        TypeError, ValueError, RecursionError: an entry cannot be written as JSON.
    """
    parts: list[bytes] = []
    text_bytes = 0
    for given in entries:
        if _PLAIN_TYPES.issuperset(map(type, given.values())) and all(type(name) is str for name in given):
            entry = dict(sorted(given.items()))
        else:
            entry = json.loads(json.dumps(given, sort_keys=True))
        if (names := tuple(entry)) != fields:
            fields = names
            parts.append(marshal.dumps(list(names), _MARSHAL_VERSION))
        parts.append(marshal.dumps(tuple(entry.values()), _MARSHAL_VERSION))
        # a number of 9 bytes takes up to 24 characters
        text_bytes += sum(map(len, names)) + _INDENT_BYTES * len(names) + 3 * len(parts[-1])
    return Packed(b"".join(parts), len(parts), text_bytes, fields)


def read_entries(area: Path, segments: Iterable[Segment]) -> Iterator[list[dict[str, Any]]]:
    """Yield the entries of each segment.

    Args:
        area: the staging area.

    Raises:
        CheckpointError: a segment is not what the snapshot was taken with.
        OSError: it cannot be read.
    """
    for segment, data in read_data(area, segments):
        # the format of a list: a letter, the number of values, the values
        values = marshal.loads(b"[" + struct.pack("<i", segment.values) + data)
        entries, fields = [], []
        for value in values:
            if type(value) is list:
                fields = value
            else:
                entries.append(dict(zip(fields, value, strict=True)))
        yield entries


def read_data(area: Path, segments: Iterable[Segment]) -> Iterator[tuple[Segment, bytes]]:
    """Yield the bytes of each segment. Arguments and errors as in `read_entries`."""
    for segment in segments:
        path = area / SEGMENTS / segment.name
        with open(path, "rb") as file:
            data = file.read(segment.size_bytes)
        if blake3(data).hexdigest() != segment.blake3:
            raise CheckpointError(f"{path} does not match its digest")
        yield segment, data


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
    keep = {segment.name for segment in used}
    for record in area.glob(f"*/{LOG_HISTORY}"):
        with suppress(CheckpointError):  # that snapshot cannot be read without it
            keep |= {segment.name for segment in read_segments(record.parent)}
    for path in (area / SEGMENTS).iterdir():
        if path.name not in keep:
            path.unlink(missing_ok=True)
