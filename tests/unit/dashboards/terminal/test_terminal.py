"""The console: faults with their recovery, lines, output of ranks, and progress, each printed once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.builders.screen import TIME, Open, Screen, fault
from support.journal import as_event

from grpo_run.dashboards.terminal import terminal as module
from grpo_run.dashboards.terminal.background_output import BackgroundStream
from grpo_run.runtime.history.history import History


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Open:
    """A screen; the loop does not run, so that only what a test does is printed."""
    monkeypatch.setattr(module, "REFRESH_SECONDS", 60.0)

    def make(width: int | None = None, shown: frozenset[int] = frozenset(), old: int = 0) -> Screen:
        made = Screen(width=width, shown=shown)
        made.history.recoveries += [fault(seconds=1.0) for _ in range(old)]
        made.terminal.start()
        return made

    return make


def test_a_fault_is_a_block_of_what_who_where_and_action(screen: Open, tmp_path: Path) -> None:
    """Facts that are not known are left out."""
    verdict = {"location": {"file": "/far/train.py", "line": 31, "function": "reward"}, "waiters": [0, 2]}
    (tmp_path / "verdict.json").write_text(json.dumps(verdict))
    made = screen()
    made.history.recoveries.append(fault(incident=str(tmp_path)))
    made.terminal.stop()
    assert made.lines() == [
        "grpo-run: FAULT Rank 1 was killed by SIGKILL in step 8 (phase reward).",
        "         detected  after 0.12 s",
        "         where     /far/train.py:31 in reward",
        "         waiting   ranks 0 and 2",
        "         action    restart all ranks: from the newest complete checkpoint",
        f"         evidence  {tmp_path}",
    ]


def test_a_recovery_is_shown_once_training_continues(screen: Open) -> None:
    """The line has the time and the cost, and appears once."""
    made = screen()
    made.history.recoveries.append(fault())
    made.terminal.notify("one")
    made.history.recoveries[0].recovery_seconds = 2.345
    made.history.recoveries[0].from_checkpoint, made.history.recoveries[0].lost_steps = 5, 2
    made.terminal.notify("two")
    made.terminal.stop()
    events = [line for line in made.lines() if line.startswith("grpo-run: ")]
    assert events == [
        "grpo-run: FAULT Rank 1 was killed by SIGKILL in step 8 (phase reward).",
        "grpo-run: one",
        (
            "grpo-run: RECOVERED training continues 2.35 s after the fault, resumed from step 5, 2 steps"
            " repeated"
        ),
        "grpo-run: two",
    ]


def test_faults_without_a_step_between_them_have_one_recovery(screen: Open) -> None:
    """Training continues once, after the last of them."""
    made = screen()
    made.history.recoveries += [fault(), fault()]
    made.terminal.notify("one")
    for recovery, seconds in zip(made.history.recoveries, (9.0, 2.0), strict=True):
        recovery.recovery_seconds = seconds
    made.terminal.stop()
    (line,) = [line for line in made.lines() if "RECOVERED" in line]
    assert line == "grpo-run: RECOVERED training continues 2.00 s after the last of 2 faults"


def test_a_fault_waits_for_its_action(screen: Open) -> None:
    """A block is printed once, complete."""
    made = screen()
    made.history.recoveries.append(fault(action=""))
    made.terminal.notify("collecting")
    assert made.lines() == ["grpo-run: collecting"]
    made.history.recoveries[0].action = "restart"
    made.terminal.stop()
    assert any("action    restart all ranks" in line for line in made.lines())


def test_faults_of_earlier_supervisors_are_not_shown_again(screen: Open) -> None:
    """They appear neither as a block nor as the latest incident."""
    made = screen(old=2)
    made.end("Finished.")
    assert made.lines() == ["grpo-run: Finished."]


def test_the_evidence_and_the_commands_are_named_before_the_last_line(screen: Open) -> None:
    """They belong to the latest fault."""
    made = screen(old=1)
    made.history.recoveries.append(fault(incident="/runs/night/incidents/0002-signal", seconds=1.0))
    made.end("Finished.")
    last = (
        "grpo-run: evidence in /runs/night/incidents/0002-signal; show it with"
        " `grpo-run report /runs/night --incident last` or `grpo-run status /runs/night`"
    )
    assert made.lines()[-2:] == [last, "grpo-run: Finished."]


@pytest.mark.parametrize("sentence", ["Rank 1 raised E in step 8.", "Rank 1 raised E in step 8"])
def test_the_fault_that_ends_the_run_is_shown_at_its_end(screen: Open, sentence: str) -> None:
    """Below the culprit's traceback; the last line says all of it, with or without a full stop."""
    made = screen()
    made.history.recoveries.append(fault(action="stop", reason="again", sentence=sentence))
    made.terminal.notify("Traceback\nE")
    made.end("Rank 1 raised E in step 8. Gave up: again.")
    assert made.lines() == [
        "Traceback",
        "E",
        f"grpo-run: FAULT {sentence}",
        "         detected  after 0.12 s",
        "         action    stop the run: again",
        "grpo-run: see `grpo-run report /runs/night` or `grpo-run status /runs/night`",
        "grpo-run: Rank 1 raised E in step 8. Gave up: again.",
    ]


def test_a_message_has_what_the_terminal_shows_of_faults_and_the_end(screen: Open) -> None:
    """Each once, without other events: the sentence and the action, the recovery, and how the run ended."""
    made = screen(old=1)
    made.terminal.notify("one")
    made.history.recoveries.append(fault())
    made.terminal.notify("two")
    made.history.recoveries[-1].recovery_seconds = 2.345
    made.terminal.notify("three")
    made.history.recoveries.append(fault(action="stop", reason="again"))
    made.end("Rank 1 was killed by SIGKILL in step 8 (phase reward). Gave up: again.")
    killed = "FAULT Rank 1 was killed by SIGKILL in step 8 (phase reward).\naction    "
    assert made.told == [
        f"{killed}restart all ranks: from the newest complete checkpoint",
        "RECOVERED training continues 2.35 s after the fault",
        f"{killed}stop the run: again",
        "Rank 1 was killed by SIGKILL in step 8 (phase reward). Gave up: again.",
    ]


def test_an_event_is_one_line_with_its_time(screen: Open) -> None:
    """Long events are not folded in a pipe."""
    made = screen()
    made.terminal.notify("word " * 40)
    made.terminal.stop()
    (line,) = made.stderr.getvalue().splitlines()
    assert TIME.match(line)
    assert TIME.sub("", line).startswith("grpo-run: word word")


def test_a_pipe_gets_no_control_codes(screen: Open) -> None:
    """The output of a fault has no escapes or carriage returns."""
    made = screen()
    made.history.recoveries.append(fault(seconds=1.0))
    made.terminal.stop()
    assert made.stderr.getvalue()
    assert "\x1b" not in made.stderr.getvalue()
    assert "\r" not in made.stderr.getvalue()


@pytest.mark.parametrize("said", [True, False])
def test_a_wrong_setting_is_said_once(screen: Open, said: bool) -> None:
    """The message is not repeated if the ranks have printed it, and there is no block; it is always told."""
    made = screen()
    if said:
        for rank in (1, 0):
            made.terminal.rank_line(rank, 1, "grpo-run: --generation max_time: no such cap")
    made.history.recoveries.append(fault(action="stop"))
    made.end("--generation max_time: no such cap", wrong_usage=True)
    assert made.lines() == ["grpo-run: --generation max_time: no such cap"]
    assert made.told == ["--generation max_time: no such cap"]


def test_a_terminal_gets_folded_lines_and_colour(screen: Open, tmp_path: Path) -> None:
    """Nothing is wider than 80 columns, and words stay whole."""
    made = screen(width=80)
    made.history.recoveries.append(fault(seconds=1.0, sentence="word " * 40, reason="because " * 20))
    made.terminal.stop()
    assert "\x1b[1;31mFAULT " in made.stderr.getvalue()
    assert "\x1b[1;32mRECOVERED " in made.stderr.getvalue()
    assert all(len(line) <= 80 for line in made.lines())
    assert all(set(line.split()) <= {"word"} for line in made.lines()[1:4])


def test_a_closed_terminal_does_not_end_the_run(screen: Open) -> None:
    """A hung-up terminal raises when it is written to."""
    made = screen()
    made.stderr.close()
    made.terminal.notify("x")
    made.terminal.stop()


def test_a_finding_of_the_memory_trace_is_printed_once(screen: Open) -> None:
    """Also one that was found just before the end; one of an earlier launch of the run is not printed
    again.
    """
    made = screen()
    record = {
        "event": "memory_finding", "time": 1.0, "rank": 1, "attempt": 0, "step": 8, "world_size": 2,
        "key": "a", "subject": "b",
        "sentence": "5 tensors",
    }  # fmt: skip
    made.history.apply(as_event(record))
    made.terminal._show_findings(made.status())
    made.history.apply(as_event({**record, "key": "c", "sentence": "6 tensors", "time": 1e12}))
    made.end("Finished.")
    assert made.lines()[:2] == ["grpo-run: memory: rank 1: 5 tensors", "grpo-run: memory: rank 1: 6 tensors"]
    again = screen()
    again.terminal._finding_lines.skip(made.history.memory_trace)
    again.history = made.history
    again.end("Finished.")
    assert again.lines() == ["grpo-run: Finished."]


@pytest.mark.parametrize(("rank", "shown"), [(0, True), (1, False)])
def test_only_ranks_that_are_shown_are_printed(
    screen: Open, capsys: pytest.CaptureFixture[str], rank: int, shown: bool
) -> None:
    """Lines go to standard output and name the rank."""
    made = screen(shown=frozenset({0}))
    made.terminal.rank_line(rank, 1, "{'loss': 0.1}")
    made.terminal.stop()
    assert capsys.readouterr().out == ("[rank0] {'loss': 0.1}\n" if shown else "")
    assert made.lines() == []


def test_lines_of_the_guard_are_always_shown(screen: Open, capsys: pytest.CaptureFixture[str]) -> None:
    """As an event of ours if the rank is not shown."""
    made = screen()
    made.terminal.rank_line(0, 1, "grpo-run: the disk is slow")
    made.terminal.stop()
    assert made.lines() == ["grpo-run: the disk is slow"]
    assert capsys.readouterr().out == ""


def test_a_traceback_is_printed_as_it_is(screen: Open) -> None:
    """Several lines, without a time."""
    made = screen()
    made.terminal.notify("Traceback:\n  File x\nValueError: no")
    made.terminal.stop()
    assert made.stderr.getvalue() == "Traceback:\n  File x\nValueError: no\n"


class Pipe(BackgroundStream):
    """A stream that output is passed on to."""

    def __init__(self) -> None:
        self.taken = b""

    @property
    def has_room(self) -> bool:
        return True

    def write_bytes(self, data: bytes) -> None:
        self.taken += data

    def write_file(self, path: Path, start: int) -> None:
        self.taken += path.read_bytes()[start:]


def test_in_a_pipe_the_bytes_of_shown_ranks_are_passed_on_without_lines_of_the_guard(
    screen: Open, tmp_path: Path
) -> None:
    """A line of the guard is an event, once for all ranks, and also of a rank that is not shown."""
    made, out, err = screen(shown=frozenset({0, 1})), Pipe(), Pipe()
    made.terminal._passed_on = {1: out, 2: err}
    made.terminal.rank_bytes(0, 1, b"\xff plain\r\n")
    made.terminal.rank_bytes(
        0, 2, b"Traceback (most recent call last):\ngrpo-run: the disk is slow\nKeyError: 1\n"
    )
    made.terminal.rank_bytes(1, 2, b"grpo-run: the disk is slow\n")
    made.terminal.rank_bytes(2, 2, b"grpo-run: of rank 2\nnot shown\n")
    rest = tmp_path / "rank0.log"
    rest.write_bytes(b"..the rest")
    made.terminal.rank_file(0, 1, rest, 2)
    made.terminal.rank_file(2, 1, rest, 2)
    assert (out.taken, err.taken) == (
        b"\xff plain\r\nthe rest",
        b"Traceback (most recent call last):\nKeyError: 1\n",
    )
    assert made.lines() == ["grpo-run: the disk is slow", "grpo-run: of rank 2"]


@pytest.mark.parametrize(("streams", "descriptor"), [((1,), 1), ((1, 2), 2)])
def test_an_event_begins_a_line_where_a_rank_has_begun_one(
    screen: Open, streams: tuple[int, ...], descriptor: int
) -> None:
    """A progress bar stays readable, in one pipe for both streams or in that of standard error."""
    made = screen(shown=frozenset({0}))
    made.terminal._passed_on = {stream: Pipe() for stream in streams}
    made.terminal.rank_bytes(0, descriptor, b"\r 7%")
    made.terminal.notify("one")
    made.terminal.notify("two")
    assert made.stderr.getvalue().startswith("\n")
    assert made.stderr.getvalue().count("\n") == 3


def test_a_reader_that_is_gone_ends_nothing(screen: Open) -> None:
    """The rank's file has what it prints."""
    made, pipe = screen(shown=frozenset({0})), Pipe()
    pipe.write_bytes = refuse  # type: ignore[method-assign]
    made.terminal._passed_on = {1: pipe}
    made.terminal.rank_bytes(0, 1, b"line\n")
    made.terminal.notify("continues")
    assert made.lines() == ["grpo-run: continues"]


def refuse(data: bytes) -> None:
    """Fail as a pipe without a reader does."""
    raise BrokenPipeError


def test_the_progress_line_is_printed_in_a_pipe(screen: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line per interval, when it has changed."""
    monkeypatch.setattr(module, "REFRESH_SECONDS", 0.005)
    monkeypatch.setattr(module, "INTERVAL_SECONDS", 0.01)
    made = Screen(width=None, shown=frozenset())
    made.terminal.start()
    while not made.lines():
        pass
    made.terminal._stop.wait(0.1)
    made.history.step = 8
    while len(made.lines()) < 2:
        pass
    made.terminal.stop()
    assert made.lines() == ["grpo-run: step 7 · 2 ranks", "grpo-run: step 8 · 2 ranks"]


def test_an_unchanged_progress_line_is_not_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes more CPU time than everything else that a watched run needs."""
    monkeypatch.setattr(module, "REFRESH_SECONDS", 0.005)
    made = Screen(width=80, shown=frozenset())
    made.terminal.start()
    while "step 7" not in made.stderr.getvalue():
        pass
    made.terminal._stop.wait(0.05)
    drawn = made.stderr.getvalue()
    made.terminal._stop.wait(0.5)  # rich by itself would draw four times a second
    assert made.stderr.getvalue() == drawn
    made.history.step = 8
    while "step 8" not in made.stderr.getvalue():
        pass
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
    made.terminal.start()
    made.history.snapshot_interval = interval
    while printed and not any("snapshot is" in line for line in made.lines()):
        pass
    made.history.snapshot_interval = 60 if printed else interval
    made.terminal._stop.wait(0.1)
    made.terminal.stop()
    said = [line for line in made.lines() if "snapshot is taken in memory every" in line]
    text = "20 steps: a fault repeats at most about 40 s of training"
    assert said == [f"grpo-run: a snapshot is taken in memory every {text}"] * printed
