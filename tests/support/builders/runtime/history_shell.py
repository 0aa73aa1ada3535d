"""A journal that is replayed record by record, and what its history says: the shell of transcripts."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from typing import Any

from grpo_run.runtime.history.history import History
from grpo_run.runtime.history.summary import lacks_model_of_script, summarize
from grpo_run.runtime.supervisor.policy import start_of
from support.builders.runtime import journal_records
from support.journal import as_event

SHORT: dict[str, Callable[..., tuple[float, str, dict[str, Any]]]] = {
    name: getattr(journal_records, name)
    for name in ("started", "attempt", "train", "commit", "published", "incident", "restored", "ended")
}
"""Records that have a word of their own; others are written by the name of their event."""


class HistoryShell:
    """A history that has seen nothing yet."""

    def __init__(self) -> None:
        self.begin()

    def begin(self, records: str = "") -> None:
        """Begin again, with these records."""
        self.history = History()
        self.replay(records)

    def replay(self, records: str) -> None:
        """Apply records, with a comma between two: the time, the word, its arguments, and fields as JSON."""
        for record in filter(None, records.split(", ")):
            time, word, *rest = shlex.split(record)
            positions = [value_of(one) for one in rest if "=" not in one]
            fields = {
                name: value_of(value)
                for name, equals, value in (one.partition("=") for one in rest)
                if equals
            }
            if word in SHORT:
                at, event, made = SHORT[word](float(time), *positions)
            else:
                at, event, made = float(time), word, {}
            self.history.apply(as_event({"time": at, "event": event, **made, **fields}))

    def faults(self, *keys: str, times: str = "1") -> None:
        """Rank 1 fails so often by the error of each key, and the run recovers at once."""
        for key in keys * int(times):
            self.replay(f"50 incident 1 cause=exception {shlex.quote(f'repeat_key={key}')}")
            self.replay("50 action action=restart, 51 commit 40")

    def show(self, *paths: str) -> str:
        """These values: of a path with dots, each element of a list; `:NUMBER` is an argument of a method."""
        return ", ".join(f"{path} {text_of(read(self.history, path.split('.')))}" for path in paths)

    def spent(self) -> str:
        """The seconds of each state that has any."""
        seconds = {state.value: value for state, value in self.history.wall.seconds.items() if value}
        return ", ".join(f"{state} {value:g}" for state, value in seconds.items())

    def summary(self, state: str, code: str = "") -> str:
        """The sentence on a run in this state that has ended with this code."""
        return summarize(state, self.history, int(code) if code else None)

    def restarts_from(self) -> str:
        """What a restart resumes from."""
        return start_of(self.history)

    def lacks_model(self) -> bool:
        """Whether a finished run has no model of the script on disk."""
        return lacks_model_of_script(self.history)


def value_of(word: str) -> Any:
    """A JSON value, or the word itself."""
    try:
        return json.loads(word)
    except ValueError:
        return word


def text_of(value: Any) -> str:
    """A value as answers have it; computed ones are rounded."""
    if isinstance(value, float):
        return f"{value:.9g}"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key} {text_of(one)}' for key, one in value.items())}}}"
    return f"[{', '.join(map(text_of, value))}]" if isinstance(value, list) else str(value)


def read(value: Any, path: list[str]) -> Any:
    """The value at the end of a path."""
    if not path:
        return value
    if isinstance(value, list | tuple):
        return [read(one, path) for one in value]
    name, _, argument = path[0].partition(":")
    found = getattr(value, name, None) if value is not None else None
    if callable(found):
        found = found(float(argument)) if argument else found()
    return read(found, path[1:])
