"""Typed records of a run's journal: the base class of events, and how a line is made of one and read again.

An event is a record whose name in the file is its class name in snake case. Its class stands in the
module that gives it a meaning, beside what is replayed from it; `runtime/history/events.py` has those of the
run itself. `runtime/history/journal.py` writes and reads lines. A line that is no event of a reader's types
becomes `Unread`, so that a journal can have events that a reader does not know. Does no I/O.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from typing import Any, ClassVar, TypeVar, Union

import msgspec

_WORD = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


def _snake_case(name: str) -> str:
    return _WORD.sub("_", name).lower()


class _Header(msgspec.Struct, kw_only=True):
    """The fields of a line that every event has."""

    time: float = 0.0
    monotonic: float = 0.0
    run: str = ""
    attempt: int | None = None
    rank: int | None = None
    step: int | None = None


class Event(_Header, kw_only=True, tag_field="event", tag=_snake_case):
    """What every event has. The journal fills in the first four; `attempt` only if the event has none.

    Attributes:
        time: seconds since the epoch.
        monotonic: seconds of this machine's clock.
        run: id of the run.
        attempt: from 0; None before the first.
        rank: that the event is of; None for the supervisor's.
        step: after which, or in which, it happened; None outside of steps.
        private_fields: of the class: hold content of the user's data, which log files leave out.
    """

    private_fields: ClassVar[tuple[str, ...]] = ()


AnyEvent = TypeVar("AnyEvent", bound=Event)


class Unread(Event, kw_only=True):
    """A line of the journal that is not read: written by another version, or shortened to its header.

    Attributes:
        name: of the event.
        damaged: the reader knows the event, and its fields are not valid.
    """

    name: str
    damaged: bool


class _AnyLine(_Header, kw_only=True):
    """What is read of a line of any event."""

    event: str


def event_name(kind: Event | type[Event]) -> str:
    """Return the name of an event in the journal."""
    return kind.name if isinstance(kind, Unread) else str(kind.__struct_config__.tag)


def as_record(event: Event) -> dict[str, Any]:
    """Return an event as the JSON object of its line."""
    record: dict[str, Any] = msgspec.to_builtins(event, enc_hook=_plain)
    return record


def encode(event: Event) -> bytes:
    """Return the line of an event, without a newline. Floats that are not finite become null."""
    try:
        return _ENCODER.encode(event)
    except UnicodeEncodeError:  # half of a surrogate pair, as a path may have one
        record = _replaced(as_record(event), math.inf)
        return json.dumps(record, separators=(",", ":"), ensure_ascii=False).encode(errors="backslashreplace")


def header_with(event: Event, **fields: Any) -> bytes:
    """Return a line that has the fields of every event, and some further ones instead of the event's own."""
    return _ENCODER.encode({"event": event_name(event), **_header(event), **fields})


def with_short_texts(event: AnyEvent, most_characters: int) -> AnyEvent:
    """Return the event with texts of at most so many characters, in lists and mappings too.

    Checks no type: an event that can be written must not fail here because it is long.
    """
    fields = {name: _replaced(getattr(event, name), most_characters) for name in event.__struct_fields__}
    return msgspec.structs.replace(event, **fields)


def _replaced(value: Any, most_characters: float) -> Any:
    """The value with short texts, and null for floats that are not finite."""
    if isinstance(value, str) and len(value) > most_characters:
        return value[: int(most_characters)] + "…"
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _replaced(item, most_characters) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_replaced(item, most_characters) for item in value]
    return value


def _plain(value: Any) -> Any:
    """A value that JSON lacks: NumPy's and other subclasses of numbers as the number, all else as text."""
    for kind in (bool, int, float):
        if isinstance(value, kind):
            return kind(value)
    return str(value)


_ENCODER = msgspec.json.Encoder(enc_hook=_plain)
_LINES = msgspec.json.Decoder(_AnyLine)
_INVALID = (msgspec.DecodeError, ValueError, RecursionError)


class EventDecoder:
    """Reads lines as events of certain types.

    Args:
        types: of the events; lines of others become `Unread`.
    """

    def __init__(self, types: Iterable[type[Event]]) -> None:
        kinds = tuple(types)
        self._names = {event_name(kind) for kind in kinds}
        self._union: Any = Union[kinds]  # noqa: UP007 - made of a tuple
        self._decoder = msgspec.json.Decoder(self._union)

    def decode(self, line: bytes) -> Event | None:
        """Return the event of a line; None if the line is none, as one that a crash has truncated."""
        try:
            event: Event = self._decoder.decode(line)
        except _INVALID:
            return self._decode_other(line)
        return event

    def _decode_other(self, line: bytes) -> Event | None:
        try:
            header = _LINES.decode(line)
        except _INVALID:
            return self._decode_leniently(line)
        if header.event in self._names and (event := self._decode_leniently(line)) is not None:
            return event
        return _unread(header, damaged=header.event in self._names)

    def _decode_leniently(self, line: bytes) -> Event | None:
        """Read a line with half of a surrogate pair, which only `json` accepts."""
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            return None
        if not isinstance(record, dict) or not isinstance(name := record.get("event"), str):
            return None
        known = name in self._names
        try:
            if known:
                event: Event = msgspec.convert(record, self._union)
                return event
            return _unread(msgspec.convert(record, _AnyLine), damaged=False)
        except msgspec.ValidationError:
            return Unread(name=name, damaged=True)


def _unread(line: _AnyLine, *, damaged: bool) -> Unread:
    return Unread(name=line.event, damaged=damaged, **_header(line))


def _header(line: _Header) -> dict[str, Any]:
    return {name: getattr(line, name) for name in _Header.__struct_fields__}
