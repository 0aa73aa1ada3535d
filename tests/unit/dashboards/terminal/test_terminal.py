"""The console: faults with their recovery, lines, output of ranks, and progress, each printed once."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from support.builders.screen import Open, Screen, fault
from support.builders.screen_shell import ScreenShell
from support.transcripts import Story, stories

from grpo_run.dashboards.terminal import terminal as module
from grpo_run.runtime.history.history import History


@stories(__file__, "stories.txt")
def test_stories(
    story: Story,
    word: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Every story of the file."""
    monkeypatch.chdir(tmp_path)
    story.check(ScreenShell(tmp_path, monkeypatch, capsys), word)


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Open:
    """A screen; the loop does not run, so that only what a test does is printed."""
    monkeypatch.setattr(module, "REFRESH_SECONDS", 60.0)

    def make(width: int | None = None, shown: frozenset[int] = frozenset(), old: int = 0) -> Screen:
        made = Screen(width=width, shown=shown)
        made.history.recoveries += [fault(seconds=1.0) for _ in range(old)]
        made.terminal.start(made.status)
        return made

    return make


def test_a_closed_terminal_does_not_end_the_run(screen: Open) -> None:
    """A hung-up terminal raises when it is written to."""
    made = screen()
    made.stderr.close()
    made.terminal.notify("x")
    made.terminal.stop()


def test_the_progress_line_is_printed_in_a_pipe(screen: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line per interval, when it has changed."""
    monkeypatch.setattr(module, "REFRESH_SECONDS", 0.005)
    monkeypatch.setattr(module, "INTERVAL_SECONDS", 0.01)
    made = Screen(width=None, shown=frozenset())
    made.terminal.start(made.status)
    while not made.lines():
        time.sleep(0.001)
    made.terminal._stop.wait(0.1)
    made.history.step = 8
    while len(made.lines()) < 2:
        time.sleep(0.001)
    made.terminal.stop()
    assert made.lines() == ["grpo-run: step 7 · 2 ranks", "grpo-run: step 8 · 2 ranks"]


def test_an_unchanged_progress_line_is_not_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes more CPU time than everything else that a watched run needs."""
    monkeypatch.setattr(module, "REFRESH_SECONDS", 0.005)
    made = Screen(width=80, shown=frozenset())
    made.terminal.start(made.status)
    while "step 7" not in made.stderr.getvalue():
        time.sleep(0.001)
    made.terminal._stop.wait(0.05)
    drawn = made.stderr.getvalue()
    made.terminal._stop.wait(0.5)  # rich by itself would draw four times a second
    assert made.stderr.getvalue() == drawn
    made.history.step = 8
    while "step 8" not in made.stderr.getvalue():
        time.sleep(0.001)
    made.terminal.stop()


@pytest.mark.parametrize(
    ("interval", "known_before", "printed"), [(20, False, True), (20, True, False), (600, False, False)]
)
def test_the_snapshot_interval_is_printed_once(
    monkeypatch: pytest.MonkeyPatch, interval: int, known_before: bool, printed: bool
) -> None:
    """Each train() call and each attempt chooses one; the first is representative.

    Not at all if an earlier supervisor has printed it, or the call ends before the next snapshot.
    """
    monkeypatch.setattr(module, "REFRESH_SECONDS", 0.005)
    made = Screen(width=None, shown=frozenset())
    made.history = History(step=7, target_steps=500, snapshot_interval=20 if known_before else None)
    made.history.steps.begin(0, 0, 0.0)
    for step in range(1, 8):
        made.history.steps.commit(0, step, 2.0 * step)
    made.terminal.start(made.status)
    made.history.snapshot_interval = interval
    while printed and not any("snapshot is" in line for line in made.lines()):
        time.sleep(0.001)
    made.history.snapshot_interval = 60 if printed else interval
    made.terminal._stop.wait(0.1)
    made.terminal.stop()
    said = [line for line in made.lines() if "snapshot is taken in memory every" in line]
    text = "20 steps: a fault repeats at most about 40 s of training"
    assert said == [f"grpo-run: a snapshot is taken in memory every {text}"] * printed
