"""A console under test, in a pipe or on a terminal, and a fault for it to show."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from grpo_run.dashboards.terminal.terminal import Terminal
from grpo_run.runtime.history.history import History
from grpo_run.runtime.history.recovery import Recovery
from grpo_run.runtime.history.status import RunStatus
from grpo_run.watchdog.observation import Slot

TIME = re.compile(r"^\d\d:\d\d:\d\d ")


class Screen:
    """A terminal under test, the history it shows, and what was told and printed to standard error."""

    def __init__(self, *, width: int | None, shown: frozenset[int], brief: bool = False) -> None:
        self.history = History(step=7)
        self.slots: tuple[Slot | None, ...] = (None, None)
        self.stderr = io.StringIO()
        self.told: list[str] = []
        self.terminal = Terminal(shown_ranks=shown, brief=brief, tell=self.told.append)
        is_terminal = width is not None
        self.terminal._console = Console(
            file=self.stderr, force_terminal=is_terminal, width=width, highlight=False, markup=False,
            soft_wrap=True,
            color_system="standard" if is_terminal else None,
        )  # fmt: skip
        self.terminal._is_screen = is_terminal

    def status(self) -> RunStatus:
        """Return the status of the run."""
        return RunStatus(
            run_id="night", state="running", sentence="", history=self.history, slots=self.slots,
            supervisor_pid=1
        )  # fmt: skip

    def end(self, sentence: str, *, wrong_usage: bool = False) -> None:
        """End the run."""
        self.terminal.stop()
        self.terminal.show_end(sentence, wrong_usage=wrong_usage, run_directory=Path("/runs/night"))

    def lines(self) -> list[str]:
        """What was printed, without times and control codes."""
        text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.stderr.getvalue()).replace("\r", "\n")
        return [TIME.sub("", line).rstrip() for line in text.splitlines() if line.strip()]


Open = Callable[..., Screen]


def fault(seconds: float | None = None, **changes: Any) -> Recovery:
    """Rank 1 was killed in step 8."""
    fields: dict[str, Any] = {
        "cause": "signal", "rank": 1, "step": 7, "action": "restart", "detection_seconds": 0.1234,
        "sentence": "Rank 1 was killed by SIGKILL in step 8 (phase reward).", "recovery_seconds": seconds,
        "reason": "from the newest complete checkpoint",
    }  # fmt: skip
    return Recovery(**(fields | changes))
