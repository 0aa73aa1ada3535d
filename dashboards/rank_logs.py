"""What ranks have printed, line by line: the files of `runtime/history/attempt_files.py`. Writes nothing."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from grpo_run.dashboards.clean_text import clean
from grpo_run.runtime.history.run_directory import RunDirectory

_NAME = re.compile(r"rank(\d+)\.(log|err)")
_ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\0")


@dataclass(frozen=True, kw_only=True, slots=True)
class LogLine:
    """One line of a rank; descriptor 2 is its standard error in a file of its own."""

    attempt: int
    rank: int
    descriptor: int
    text: str


class RankLogs:
    """Follows the output of a run.

    Args:
        ranks: whose output; None for all.
        attempt: of which attempt; None for all.
        lines: begin with so many last lines of each file; None for all.
    """

    def __init__(
        self,
        run: RunDirectory,
        *,
        ranks: Collection[int] | None = None,
        attempt: int | None = None,
        lines: int | None = None,
    ) -> None:
        self._folder, self._ranks, self._attempt, self._lines = run.path / "attempts", ranks, attempt, lines
        self._ends: dict[Path, int] = {}

    def new(self) -> Iterator[LogLine]:
        """Yield the lines since the last call."""
        for path in sorted(self._folder.glob("[0-9]*/rank*")):
            found, attempt = _NAME.fullmatch(path.name), int(path.parent.name)
            if not found or self._attempt not in (None, attempt):
                continue
            if self._ranks is not None and int(found[1]) not in self._ranks:
                continue
            with open(path, "rb") as file:
                file.seek(self._ends.get(path, 0))
                whole, newline, _ = file.read().rpartition(b"\n")
            first, self._ends[path] = path not in self._ends, self._ends.get(path, 0) + len(whole + newline)
            texts = whole.decode(errors="replace").split("\n") if newline else []
            for text in texts[-self._lines :] if self._lines and first else texts:
                shown = clean(_ESCAPES.sub("", text.rpartition("\r")[2]))
                descriptor = 1 if found[2] == "log" else 2
                yield LogLine(attempt=attempt, rank=int(found[1]), descriptor=descriptor, text=shown)

    rest = new
