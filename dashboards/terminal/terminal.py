"""The console of `grpo-run launch`: progress line, events, faults, and output of the ranks shown.

On a terminal the progress line stays at the bottom and long lines are folded. In a pipe or a file, where
every printed line stays, `PipeSchedule` says when the line is printed (asked twice a second; pure, the
clock is passed in), every event is one line, and no control codes are written. Events go to
standard error. Output of ranks is passed on byte for byte where it is not a terminal that takes it, as
under torchrun. A terminal gets lines, with the rank before each. Made by `cli/launching/_display.py`;
thread-safe.
"""

from __future__ import annotations

import contextlib
import re
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from rich.console import Console
from rich.live import Live
from rich.text import Text

from grpo_run.dashboards.terminal._incidents import LABEL_WIDTH, fault_lines, inspection_line, recovered_line
from grpo_run.dashboards.terminal._progress import progress_line
from grpo_run.dashboards.terminal.background_output import BackgroundStream
from grpo_run.runtime.errors import EXIT_STOPPED
from grpo_run.runtime.files import short_path
from grpo_run.runtime.history.history import History
from grpo_run.runtime.history.recovery import Recovery
from grpo_run.runtime.history.status import RunStatus
from grpo_run.watchdog.text import counted, duration_text

INTERVAL_SECONDS = 15.0
"""Shortest time between two lines of a run that trains."""
LONGEST_INTERVAL_SECONDS = 600.0
"""The interval between the lines of one wait doubles up to this."""


class PipeSchedule:
    """Decides which states of the progress line are printed.

    A line of training is printed when it has changed, at most every `INTERVAL_SECONDS`, the first one
    immediately. A start is reported once it takes that long. A wait is reported when it begins, and then at
    growing intervals.

    Args:
        now: monotonic seconds.
    """

    def __init__(self, now: float) -> None:
        self._printed_at = now
        self._trained = False
        self._last = ""
        self._wait: Hashable = None
        self._interval_seconds = INTERVAL_SECONDS

    def due(self, starting: bool, text: str, wait: Hashable, now: float) -> bool:
        """Return whether to print this line, and assume that it is printed.

        Args:
            starting, text: of the line.
            wait: identifies who is waited for and where; None outside a wait.
            now: monotonic seconds.
        """
        began, self._wait = wait is not None and wait != self._wait, wait
        if began or wait is None:
            self._interval_seconds = INTERVAL_SECONDS
        first = wait is None and not (starting or self._trained)
        if not (began or first) and (text == self._last or now - self._printed_at < self._interval_seconds):
            return False
        if wait is not None and not began:
            self._interval_seconds = min(2 * self._interval_seconds, LONGEST_INTERVAL_SECONDS)
        self._trained |= not starting
        self._last, self._printed_at = text, now
        return True


NAME = "grpo-run: "
"""Prefix of our lines. A rank's line that begins so is printed by the guard: a warning or an event, always
shown."""
FAULT, RECOVERED = "FAULT ", "RECOVERED "
TOLD = ("where", "action")
"""Facts of a fault that `tell` gets."""
BAR = re.compile(r"(?:[^|\n]{0,80}:)?\s*\d{1,3}%\|[^|]{0,400}\|\s*[^\s/]+/\S+ \[[^\]]*\]")
"""A state of tqdm's progress bar."""
METRICS = re.compile(r"\s*\{'.*'epoch': .*\}\s*")
"""What a Trainer prints of a step: the progress line, `grpo-run status` and the reports have it."""
STYLES = {FAULT: "bold red", RECOVERED: "bold green"}
INDENT = " " * 9
"""Width of the time, so that folded lines and facts stand below the text."""
REFRESH_SECONDS = 1.0
"""In a pipe a progress line is rare, and faults are printed when the next attempt begins at the latest."""


def _without_progress(line: str) -> str:
    """Return what a line says beside progress bars and logged metrics; empty if nothing."""
    if "%|" not in line and "{'" not in line:
        return line or " "
    left = BAR.sub("", line)
    return "" if not left.strip() or METRICS.fullmatch(left) else left


class _Console(Console):
    """Console that falls silent when its reader is gone; rich itself would end the process."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


class Terminal:
    """Writes what the user sees of a run.

    Args:
        shown_ranks: ranks whose output is printed; the ranks' files hold all of it.
        brief: leave out progress bars and the metrics that a Trainer prints.
        passed_on: the streams that get the ranks' output byte for byte, by descriptor; a stream that is also
            standard error's is descriptor 1. Empty on a terminal.
        tell: receives faults with their place and action, recoveries, and how the run has ended.
    """

    def __init__(
        self,
        *,
        shown_ranks: frozenset[int],
        passed_on: Mapping[int, BackgroundStream] = MappingProxyType({}),
        brief: bool = False,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._shown_ranks = shown_ranks
        self._passed_on = passed_on
        self._brief = brief
        self._tell = tell
        self._line_is_open = False
        """A rank has begun a line where events are printed."""
        self._status: Callable[[], RunStatus] | None = None
        """Reads the state of the run; None while there is none."""
        self._console = _Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
        self._is_screen = self._console.is_terminal and not self._console.is_dumb_terminal
        self._live: Live | None = None
        self._lock = threading.RLock()
        self._faults_at_start = 0
        self._faults_shown = 0
        self._unrecovered: list[Recovery] = []
        self._guard_lines: dict[str, int] = {}
        self._interval_shown = False
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, status: Callable[[], RunStatus]) -> None:
        """Start to show progress and faults. Faults that are already in the history are not shown again.

        Args:
            status: reads the state of the run.
        """
        history = status().history
        self._faults_at_start = self._faults_shown = len(history.recoveries)
        self._interval_shown = history.snapshot_interval is not None
        self._status = status
        if self._is_screen:
            self._live = Live(
                console=self._console,
                auto_refresh=False,  # rich would draw the same line four times a second
                transient=True,
                redirect_stdout=sys.stdout.isatty(),
            )
            self._live.start()
        self._thread = threading.Thread(
            target=self._loop, args=(status,), daemon=True, name="grpo-run-terminal"
        )
        self._thread.start()

    def stop(self) -> None:
        """Show the last events and remove the progress line."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(2.0)
        self.show_faults()
        if self._live is not None:
            with contextlib.suppress(OSError, ValueError):
                self._live.stop()

    def rank_line(self, rank: int, descriptor: int, line: str) -> None:
        """Print one line of a rank's output, if the rank is shown or the line is the guard's.

        A line that the guard prints in several ranks is printed once.
        """
        if line.startswith(NAME):
            text = line.removeprefix(NAME)
            repeated = self._guard_lines.setdefault(text, rank) != rank
            if (self._brief or rank not in self._shown_ranks) and not repeated:
                self._event(text)
            if self._brief:
                return
        if rank not in self._shown_ranks or (self._brief and not (line := _without_progress(line))):
            return
        stream = sys.stderr if descriptor == 2 else sys.stdout
        # the reader is gone, or there never was one; the rank's file has the line
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.write(f"[rank{rank}] {line}\n")
            stream.flush()

    def takes_bytes(self, descriptor: int) -> bool:
        """Whether output of ranks to a descriptor is passed on byte for byte."""
        return descriptor in self._passed_on

    def has_room(self, descriptor: int) -> bool:
        """Whether the reader has taken most of what was passed on."""
        return self._passed_on[descriptor].has_room

    def rank_bytes(self, rank: int, descriptor: int, data: bytes) -> None:
        """Pass on what a rank has printed, if it is shown, except for lines of the guard.

        Args:
            data: whole lines where possible.
        """
        shown = []
        for line in data.splitlines(keepends=True) if NAME.encode() in data else [data]:
            if not line.startswith(NAME.encode()):
                shown.append(line)
                continue
            text = line.decode(errors="replace").removeprefix(NAME).rstrip()
            if self._guard_lines.setdefault(text, rank) == rank:
                self._event(text)
        if (passed := b"".join(shown)) and rank in self._shown_ranks:
            with self._lock, contextlib.suppress(OSError):  # the reader is gone; the rank's file has it
                if self._event_stream == descriptor:
                    self._line_is_open = not passed.endswith(b"\n")
                self._passed_on[descriptor].write_bytes(passed)

    def rank_file(self, rank: int, descriptor: int, path: Path, start: int) -> None:
        """Pass on a file from a position to its end, if the rank is shown, without waiting for the reader."""
        if rank in self._shown_ranks:
            self._passed_on[descriptor].write_file(path, start)

    @property
    def _event_stream(self) -> int | None:
        """The descriptor of the ranks' output that goes where events go."""
        return None if self._is_screen else max(self._passed_on, default=None)

    def notify(self, text: str) -> None:
        """Print a message of the supervisor, after the faults that came before it.

        Args:
            text: one line; several lines, such as a traceback, are printed as they are.
        """
        self.show_faults()
        self._event(text)

    def show_end(self, sentence: str, *, wrong_usage: bool, run_directory: Path) -> None:
        """Print the fault that ended the run, where the evidence is, and last, in one line, how the run
        ended.

        Call it after `stop`.

        Args:
            sentence: how the run ended.
            wrong_usage: the run ended because the user has to correct a setting: the sentence is all there is
                to say.
            run_directory: of the run, for the commands that show more.
        """
        status = self._status() if self._status is not None else None
        if wrong_usage or status is None:
            self._tell(sentence)
            if sentence not in self._guard_lines:
                self._event(sentence)
            return
        self.show_faults(final=True)
        faults = status.history.recoveries[self._faults_at_start :]
        if faults:
            self._event(inspection_line(faults[-1], run_directory))
        if self._is_screen and status.history.exit_code == EXIT_STOPPED:
            run = short_path(run_directory)
            self._event(f"go on with `grpo-run resume {run}`, look back with `grpo-run report {run}`")
        self._tell(sentence)
        self._event(sentence)

    def _loop(self, read_status: Callable[[], RunStatus]) -> None:
        schedule = PipeSchedule(time.monotonic())
        drawn: tuple[str, int] | None = None
        while not self._stop.wait(REFRESH_SECONDS):
            status = read_status()
            self.show_faults(status)
            self._show_interval(status.history)
            line = progress_line(status)
            if self._live is not None:
                width = self._console.width
                text = line.text(width)
                if (text, width) != drawn:
                    drawn = text, width
                    shown = Text(text, style="dim", no_wrap=True, overflow="ellipsis")
                    with contextlib.suppress(OSError, ValueError):
                        self._live.update(shown, refresh=True)
            elif line.parts and schedule.due(line.starting, line.text(), line.wait, time.monotonic()):
                self._event(line.text())

    def _show_interval(self, history: History) -> None:
        """Print once in a run how often snapshots are taken, if there will be any more."""
        steps = history.snapshot_interval
        if self._interval_shown or steps is None:
            return
        self._interval_shown = True
        seconds = history.step_seconds()
        if seconds is not None and history.step + steps < history.target_steps:
            self._event(
                f"a snapshot is taken in memory every {counted(steps, 'step')}: a fault repeats at most about"
                f" {duration_text(steps * seconds)} of training"
            )

    def show_faults(self, status: RunStatus | None = None, *, final: bool = False) -> None:
        """Print every fault once its action is decided, and every recovery once training continues.

        A fault that ends the run is printed at the end (`final`), below the culprit's traceback.
        """
        if self._status is None:
            return
        status = status or self._status()
        with self._lock:
            recoveries = status.history.recoveries
            while self._faults_shown < len(recoveries) and (
                final or recoveries[self._faults_shown].action not in ("", "stop")
            ):
                recovery = recoveries[self._faults_shown]
                self._faults_shown += 1
                self._unrecovered.append(recovery)
                sentence, *facts = fault_lines(recovery)
                self._event(sentence, FAULT, facts)
                self._tell("\n".join([FAULT + sentence, *(fact for fact in facts if fact.startswith(TOLD))]))
            recovered = [one for one in self._unrecovered if one.recovery_seconds is not None]
            if recovered:
                self._unrecovered = [one for one in self._unrecovered if one.recovery_seconds is None]
                line = recovered_line(recovered[-1], faults=len(recovered))
                self._event(line, RECOVERED)
                self._tell(RECOVERED + line)

    def _event(self, text: str, word: str = "", facts: Sequence[str] = ()) -> None:
        """Print one event: the time, our name, a styled word, the text, and facts below it."""
        with self._lock, contextlib.suppress(OSError, ValueError):  # a closed terminal must not end the run
            if self._line_is_open:
                self._line_is_open = False
                self._console.file.write("\n")
            if "\n" in text:
                self._console.print(Text(text))
                return
            line = f"{time.strftime('%H:%M:%S')} {NAME}{word}{text}"
            printed = Text(
                "\n".join([*self._fold(line), *(row for fact in facts for row in self._fold(INDENT + fact))])
            )
            if word:
                start = line.index(word)
                printed.stylize(STYLES[word], start, start + len(word))
            self._console.print(printed)

    def _fold(self, line: str) -> list[str]:
        """Fold a line to the terminal's width, below its first word; a pipe gets it whole."""
        if not self._is_screen:
            return [line]
        return textwrap.wrap(
            line,
            self._console.width,
            subsequent_indent=INDENT + " " * LABEL_WIDTH if line.startswith(INDENT) else INDENT,
            break_long_words=False,
            break_on_hyphens=False,
        )
