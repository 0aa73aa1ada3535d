"""The console of `grpo-run launch`: in a pipe and on a terminal of 80 columns."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from grpo_run.dashboards.terminal import pipe_schedule
from grpo_run.dashboards.terminal import terminal as module
from grpo_run.dashboards.terminal.incidents import fault_lines, inspection_line, recovered_line
from grpo_run.dashboards.terminal.terminal import Terminal
from grpo_run.runtime.continuity.recovery import Recovery
from grpo_run.runtime.files import short_path
from grpo_run.runtime.record.history import History
from grpo_run.runtime.record.status import RunStatus
from grpo_run.watchdog.observation import RankState, Slot

TIME = re.compile(r"^\d\d:\d\d:\d\d ")


class Screen:
    """A terminal under test, the history it shows, and what was printed to standard error."""

    def __init__(self, *, width: int | None, shown: frozenset[int]) -> None:
        self.history = History(step=7)
        self.slots: tuple[Slot | None, ...] = (None, None)
        self.stderr = io.StringIO()
        self.terminal = Terminal(shown_ranks=shown, status=self.status)
        is_terminal = width is not None
        self.terminal._console = Console(
            file=self.stderr, force_terminal=is_terminal, width=width, highlight=False, markup=False, soft_wrap=True,
            color_system="standard" if is_terminal else None,
        )  # fmt: skip
        self.terminal._is_screen = is_terminal

    def status(self) -> RunStatus:
        """Return the status of the run."""
        return RunStatus(
            run_id="night", state="running", sentence="", history=self.history, slots=self.slots, supervisor_pid=1
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


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Open:
    """A screen; the loop does not run, so that only what a test does is printed."""
    for name in ("REFRESH_SECONDS", "PIPE_REFRESH_SECONDS"):
        monkeypatch.setattr(module, name, 60.0)

    def make(width: int | None = None, shown: frozenset[int] = frozenset(), old: int = 0) -> Screen:
        made = Screen(width=width, shown=shown)
        made.history.recoveries += [fault(seconds=1.0) for _ in range(old)]
        made.terminal.start()
        return made

    return make


def fault(seconds: float | None = None, **changes: Any) -> Recovery:
    """Rank 1 was killed in step 8."""
    fields: dict[str, Any] = {
        "cause": "signal", "rank": 1, "step": 7, "action": "restart", "detection_seconds": 0.1234,
        "sentence": "Rank 1 was killed by SIGKILL in step 8 (phase reward).", "recovery_seconds": seconds,
        "reason": "from the newest complete checkpoint",
    }  # fmt: skip
    return Recovery(**(fields | changes))


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
        "grpo-run: RECOVERED training continues 2.35 s after the fault, resumed from step 5, 2 steps repeated",
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


def test_the_last_line_names_the_evidence_and_the_commands(screen: Open) -> None:
    """They belong to the latest fault."""
    made = screen(old=1)
    made.history.recoveries.append(fault(incident="/runs/night/incidents/0002-signal", seconds=1.0))
    made.end("Finished.")
    last = (
        "grpo-run: evidence in /runs/night/incidents/0002-signal; show it with"
        " `grpo-run report /runs/night` or `grpo-run status /runs/night`"
    )
    assert made.lines()[-2:] == ["grpo-run: Finished.", last]


@pytest.mark.parametrize("sentence", ["Rank 1 raised E in step 8.", "Rank 1 raised E in step 8"])
def test_the_fault_that_ends_the_run_is_shown_at_its_end(screen: Open, sentence: str) -> None:
    """Below the culprit's traceback; its sentence is not repeated, with or without a full stop."""
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
        "grpo-run: Gave up: again.",
        "grpo-run: see `grpo-run report /runs/night` or `grpo-run status /runs/night`",
    ]


@pytest.mark.parametrize("said", [True, False])
def test_a_wrong_setting_is_said_once(screen: Open, said: bool) -> None:
    """The message is not repeated if the ranks have printed it, and there is no block."""
    made = screen()
    if said:
        for rank in (1, 0):
            made.terminal.rank_line(rank, "grpo-run: --generation max_time: no such cap")
    made.history.recoveries.append(fault(action="stop"))
    made.end("--generation max_time: no such cap", wrong_usage=True)
    assert made.lines() == ["grpo-run: --generation max_time: no such cap"]


def test_a_terminal_gets_folded_lines_and_colour(screen: Open, tmp_path: Path) -> None:
    """Nothing is wider than 80 columns, and words stay whole."""
    made = screen(width=80)
    made.history.recoveries.append(fault(seconds=1.0, sentence="word " * 40, reason="because " * 20))
    made.terminal.stop()
    assert "\x1b[1;31mFAULT " in made.stderr.getvalue()
    assert "\x1b[1;32mRECOVERED " in made.stderr.getvalue()
    assert all(len(line) <= 80 for line in made.lines())
    assert all(set(line.split()) <= {"word"} for line in made.lines()[1:4])


def test_the_progress_line_is_printed_in_a_pipe(screen: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line per interval, when it has changed."""
    monkeypatch.setattr(module, "PIPE_REFRESH_SECONDS", 0.005)
    monkeypatch.setattr(pipe_schedule, "INTERVAL_SECONDS", 0.01)
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


def test_the_snapshot_interval_is_printed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each train() call and each attempt chooses one; the first is representative."""
    monkeypatch.setattr(module, "PIPE_REFRESH_SECONDS", 0.005)
    made = Screen(width=None, shown=frozenset())
    made.history = History(step=7, target_steps=500)
    made.history.steps.begin(0, 0, 0.0)
    for step in range(1, 8):
        made.history.steps.commit(0, step, 2.0 * step)
    made.terminal.start()
    made.history.snapshot_interval = 20
    while not any("snapshot is" in line for line in made.lines()):
        pass
    made.history.snapshot_interval = 60
    made.terminal._stop.wait(0.1)
    made.terminal.stop()
    assert [line for line in made.lines() if "snapshot is" in line] == [
        "grpo-run: a snapshot is taken in memory every 20 steps: a fault repeats at most about 40 s of training"
    ]


@pytest.mark.parametrize(("interval", "known_before"), [(20, True), (600, False)])
def test_a_snapshot_interval_without_use_is_not_printed(
    monkeypatch: pytest.MonkeyPatch, interval: int, known_before: bool
) -> None:
    """It was printed by an earlier supervisor, or the call ends before the next snapshot."""
    monkeypatch.setattr(module, "PIPE_REFRESH_SECONDS", 0.005)
    made = Screen(width=None, shown=frozenset())
    made.history = History(step=7, target_steps=500, snapshot_interval=20 if known_before else None)
    made.history.steps.begin(0, 0, 0.0)
    for step in range(1, 8):
        made.history.steps.commit(0, step, 2.0 * step)
    made.terminal.start()
    made.history.snapshot_interval = interval
    made.terminal._stop.wait(0.1)
    made.terminal.stop()
    assert not any("snapshot is" in line for line in made.lines())


LOST = [
    "Traceback (most recent call last):",
    '  File "train.py", line 90, in <module>',
    "RuntimeError: [pair.cc:547] Connection closed by peer [127.0.0.1]:4182",
]
OWN = ["Traceback (most recent call last):", '  File "train.py", line 31, in reward', "ValueError: bad"]


@pytest.mark.parametrize("ends", [False, True])
def test_the_culprits_traceback_is_shown_first_and_once(
    screen: Open, capsys: pytest.CaptureFixture[str], make_slot: Any, ends: bool
) -> None:
    """Connection errors of the other ranks are one line of the fault, whenever they arrive."""
    made = screen(shown=frozenset({0, 1, 2}))
    made.slots = tuple(make_slot(rank, state=RankState.failed) for rank in (0, 1, 2))
    for line in ["{'loss': 0.1}", *LOST]:
        made.terminal.rank_line(0, line)
    for line in OWN:
        made.terminal.rank_line(1, line)
    sentence = "Rank 1 raised ValueError in step 8 (phase reward): bad"
    made.history.recoveries.append(fault(action="", sentence=sentence, lost_connection=(0, 2)))
    made.terminal.notify("\n".join(OWN))
    made.history.recoveries[0].action = "stop" if ends else "restart"
    for line in LOST:
        made.terminal.rank_line(2, line)
    if ends:
        made.end(f"{sentence}. Gave up: again.")
    else:
        made.terminal.attempt_begins()
        made.terminal.stop()
    assert made.lines()[:5] == [
        *OWN,
        f"grpo-run: FAULT {sentence}",
        "         detected  after 0.12 s",
    ]
    assert "         others    ranks 0 and 2 lost their connection to rank 1" in made.lines()
    assert capsys.readouterr().out == "[rank0] {'loss': 0.1}\n"


def test_output_after_a_recovery_is_shown_again(
    screen: Open, capsys: pytest.CaptureFixture[str], make_slot: Any
) -> None:
    """What was held back belongs to the attempt before."""
    made = screen(shown=frozenset({0}))
    made.slots = (make_slot(0, state=RankState.failed), None)
    for line in LOST:
        made.terminal.rank_line(0, line)
    made.history.recoveries.append(fault())
    made.terminal.attempt_begins()
    made.slots = (make_slot(0), None)
    made.terminal.rank_line(0, "again")
    made.terminal.stop()
    assert capsys.readouterr().out == "[rank0] again\n"


@pytest.mark.parametrize(("rank", "shown"), [(0, True), (1, False)])
def test_only_ranks_that_are_shown_are_printed(
    screen: Open, capsys: pytest.CaptureFixture[str], rank: int, shown: bool
) -> None:
    """Lines go to standard output and name the rank."""
    made = screen(shown=frozenset({0}))
    made.terminal.rank_line(rank, "{'loss': 0.1}")
    made.terminal.stop()
    assert capsys.readouterr().out == ("[rank0] {'loss': 0.1}\n" if shown else "")
    assert made.lines() == []


def test_lines_of_the_guard_are_always_shown(screen: Open, capsys: pytest.CaptureFixture[str]) -> None:
    """As an event of ours if the rank is not shown."""
    made = screen()
    made.terminal.rank_line(0, "grpo-run: the disk is slow")
    made.terminal.stop()
    assert made.lines() == ["grpo-run: the disk is slow"]
    assert capsys.readouterr().out == ""


def test_a_traceback_is_printed_as_it_is(screen: Open) -> None:
    """Several lines, without a time."""
    made = screen()
    made.terminal.notify("Traceback:\n  File x\nValueError: no")
    made.terminal.stop()
    assert made.stderr.getvalue() == "Traceback:\n  File x\nValueError: no\n"


def test_a_closed_terminal_does_not_end_the_run(screen: Open) -> None:
    """A hung-up terminal raises when it is written to."""
    made = screen()
    made.stderr.close()
    made.terminal.notify("x")
    made.terminal.stop()


def test_paths_are_short_inside_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Paths elsewhere are absolute."""
    monkeypatch.chdir(tmp_path)
    assert short_path(tmp_path / "runs" / "x") == "runs/x"
    assert short_path("/elsewhere/x") == "/elsewhere/x"
    assert "in runs/x/incidents/1; " in inspection_line(
        fault(incident=str(tmp_path / "runs/x/incidents/1")), tmp_path
    )


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_a_fault_without_a_readable_verdict_is_still_shown(tmp_path: Path, content: str | None) -> None:
    """A full disk takes no evidence."""
    if content is not None:
        (tmp_path / "verdict.json").write_text(content)
    lines = fault_lines(fault(incident=str(tmp_path)))
    assert lines[0].startswith("Rank 1 was killed")
    assert not any(line.startswith(("where", "waiting")) for line in lines)


@pytest.mark.parametrize(
    ("fields", "others", "waiting"),
    [
        ({"lost_connection": (0,)}, "rank 0 lost its connection to rank 1", "ranks 2 and 3"),
        ({"lost_connection": (0, 2, 3)}, "ranks 0, 2 and 3 lost their connection to rank 1", None),
        ({"also_failed": (2,)}, "rank 2 failed too", "ranks 0 and 3"),
        (
            {"also_failed": (0,), "lost_connection": (2, 3)},
            "rank 0 failed too; ranks 2 and 3 lost their connection to rank 1",
            None,
        ),
        ({"lost_connection": (0, 1, 2, 3), "rank": None}, None, None),
    ],
)
def test_the_other_ranks_that_failed_are_one_line(
    tmp_path: Path, fields: dict[str, Any], others: str | None, waiting: str | None
) -> None:
    """They are not said to wait."""
    (tmp_path / "verdict.json").write_text(json.dumps({"waiters": [0, 2, 3]}))
    facts = dict(line.split(maxsplit=1) for line in fault_lines(fault(incident=str(tmp_path), **fields))[1:])
    assert (facts.get("others"), facts.get("waiting")) == (others, waiting)


def test_a_recovery_to_the_first_step_says_so() -> None:
    """Without a checkpoint, training repeats every step."""
    line = recovered_line(fault(seconds=1.0, from_checkpoint=0, lost_steps=1))
    assert line == "training continues 1.00 s after the fault, resumed from step 0, 1 step repeated"


def test_a_finding_of_the_memory_trace_is_printed_once(screen: Open) -> None:
    """Also one that was found just before the end; one of an earlier launch of the run is not printed again."""
    made = screen()
    record = {
        "event": "memory_finding", "time": 1.0, "rank": 1, "attempt": 0, "step": 8, "world_size": 2, "key": "a", "subject": "b",
        "sentence": "5 tensors",
    }  # fmt: skip
    made.history.apply(record)
    made.terminal._show_findings(made.status())
    made.history.apply({**record, "key": "c", "sentence": "6 tensors", "time": 1e12})
    made.end("Finished.")
    assert made.lines()[:2] == ["grpo-run: memory: rank 1: 5 tensors", "grpo-run: memory: rank 1: 6 tensors"]
    again = screen()
    again.terminal._finding_lines.skip(made.history.memory_trace)
    again.history = made.history
    again.end("Finished.")
    assert again.lines() == ["grpo-run: Finished."]
