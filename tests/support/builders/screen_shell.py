"""A console, what happens to its run, and what it prints: the shell of transcripts of the terminal."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from grpo_run.dashboards.terminal import terminal as module
from grpo_run.dashboards.terminal._incidents import fault_lines, inspection_line
from grpo_run.dashboards.terminal.background_output import BackgroundStream
from support.builders.screen import Screen, fault
from support.journal import as_event


def fields_of(given: dict[str, str], here: Path) -> dict[str, Any]:
    """Fields of a fault: JSON, or else a text."""
    found: dict[str, Any] = {}
    for name, text in given.items():
        try:
            value = json.loads(text)
        except ValueError:
            value = text.replace("HERE", str(here))
        found[name] = tuple(value) if isinstance(value, list) else value
    return found


class Pipe(BackgroundStream):
    """A stream that output is passed on to; its reader may be gone."""

    def __init__(self, *, gone: bool) -> None:
        self.taken, self.gone = b"", gone

    @property
    def has_room(self) -> bool:
        """Always."""
        return True

    def write_bytes(self, data: bytes) -> None:
        """Take the bytes, or fail as a pipe without a reader does."""
        if self.gone:
            raise BrokenPipeError
        self.taken += data

    def write_file(self, path: Path, start: int) -> None:
        """Take the rest of a file."""
        self.taken += path.read_bytes()[start:]


class ScreenShell:
    """A console in a pipe, of which each command shows the lines that are new. Its loop does not run."""

    def __init__(self, here: Path, patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        patch.setattr(module, "REFRESH_SECONDS", 60.0)
        self.here, self.capsys = here, capsys
        self.open()

    def open(self, width: str = "null", shown: str = "[]", old: str = "0", brief: str = "") -> None:
        """Begin anew, with ranks that are shown, perhaps briefly, and faults of an earlier supervisor."""
        self.made = Screen(width=json.loads(width), shown=frozenset(json.loads(shown)), brief=bool(brief))
        self.made.history.recoveries += [fault(seconds=1.0) for _ in range(int(old))]
        self.made.terminal.start(self.made.status)
        self.seen = 0

    def new(self) -> str:
        """The lines that are new; those on standard output begin with `out: `."""
        lines = self.made.lines()
        found, self.seen = lines[self.seen :], len(lines)
        found += [f"out: {line}" for line in self.capsys.readouterr().out.splitlines()]
        return "\n".join(found).replace(str(self.here), "HERE")

    def verdict(self, text: str) -> None:
        """Write the verdict of the incident."""
        (self.here / "verdict.json").write_text(text)

    def fault(self, **given: str) -> None:
        """A fault has happened."""
        self.made.history.recoveries.append(fault(**fields_of(given, self.here)))

    def recover(self, *seconds: str, **given: str) -> None:
        """The faults have been recovered from."""
        for recovery, text in zip(self.made.history.recoveries, seconds, strict=True):
            recovery.recovery_seconds = json.loads(text)
            for name, value in fields_of(given, self.here).items():
                setattr(recovery, name, value)

    def apply(self, record: str) -> None:
        """A record of the journal."""
        self.made.history.apply(as_event(json.loads(record)))

    def notify(self, text: str) -> str:
        """An event of the supervisor."""
        self.made.terminal.notify(text.replace("\\n", "\n"))
        return self.new()

    def rank(self, rank: str, descriptor: str, text: str) -> str:
        """A line of a rank."""
        self.made.terminal.rank_line(int(rank), int(descriptor), text)
        return self.new()

    def pipes(self, *descriptors: str, gone: str = "") -> None:
        """Pass on the output of ranks to pipes."""
        self.made.terminal._passed_on = {int(one): Pipe(gone=bool(gone)) for one in descriptors}

    def bytes(self, rank: str, descriptor: str, text: str) -> str:
        """Bytes of a rank."""
        data = text.encode().decode("unicode_escape").encode("latin-1")
        self.made.terminal.rank_bytes(int(rank), int(descriptor), data)
        return self.new()

    def rest(self, rank: str, text: str, start: str) -> None:
        """What a rank's file has beyond a position."""
        path = self.here / "rank.log"
        path.write_text(text)
        self.made.terminal.rank_file(int(rank), 1, path, int(start))

    def taken(self) -> str:
        """What the pipes have taken."""
        return "\n".join(f"{one} {pipe.taken!r}" for one, pipe in self.made.terminal._passed_on.items())

    def stop(self) -> str:
        """Stop the console."""
        self.made.terminal.stop()
        return self.new()

    def end(self, sentence: str, wrong_usage: str = "") -> str:
        """The run has ended."""
        self.made.end(sentence, wrong_usage=bool(wrong_usage))
        return self.new()

    def told(self) -> str:
        """The messages that were sent."""
        return "\n".join(map(repr, self.made.told))

    def codes(self) -> str:
        """All that was printed, as Python writes it, without times."""
        text = self.made.stderr.getvalue().splitlines(keepends=True)
        return "\n".join(repr(re.sub(r"\d\d:\d\d:\d\d", "TIME", line)) for line in text)

    def facts(self, **given: str) -> str:
        """The lines of a fault."""
        return "\n".join(fault_lines(fault(incident=str(self.here), **fields_of(given, self.here))))

    def inspection(self, path: str) -> str:
        """The line that names the evidence, in a run directory here."""
        line = inspection_line(fault(incident=path.replace("HERE", str(self.here))), self.here)
        return line.replace(str(self.here), "HERE")
