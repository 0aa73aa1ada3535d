"""Events of the journal by name and fields, as tests state them, and the lines of a journal as objects."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from grpo_run.runtime.event import Event, EventDecoder, Unread, event_name
from grpo_run.runtime.history.history import DECODER
from grpo_run.runtime.history.journal import JournalReader


def _kinds(base: type[Event] = Event) -> Iterator[type[Event]]:
    for kind in base.__subclasses__():
        yield kind
        yield from _kinds(kind)


def event(name: str, /, **fields: Any) -> Event:
    """Return an event of a module that is imported; of another name, one that nobody reads."""
    for kind in _kinds():
        if event_name(kind) == name:
            return msgspec.convert({"event": name, **fields}, kind)
    return Unread(name=name, damaged=False)


def as_event(record: Mapping[str, Any], decoder: EventDecoder = DECODER) -> Event:
    """Return an event as a reader of the history gets it from a line."""
    found = decoder.decode(json.dumps(record, default=str).encode())
    assert found is not None, record
    return found


def as_events(records: Iterable[Mapping[str, Any]]) -> list[Event]:
    """Return the events of a journal."""
    return [as_event(record) for record in records]


class _Objects(EventDecoder):
    """Reads lines as objects, as far as the product takes them for events."""

    def decode(self, line: bytes) -> Any:
        """Return the object of a line; None if the line is no event."""
        return None if DECODER.decode(line) is None else json.loads(line)


def record_reader(path: Path) -> Any:
    """Return a `JournalReader` that yields the objects of a journal, whatever their events are."""
    return JournalReader(path, _Objects((Unread,)))


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a journal."""
    records: Iterator[dict[str, Any]] = record_reader(path).new()
    return records
