"""The board says how a script has ended before exit handlers run, and they cannot keep the rank alive."""

from __future__ import annotations

import atexit
import os
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.builders.trainers.script_runs import Run

from grpo_run.runtime.launch.rank_settings import RankSettings
from grpo_run.runtime.rank import bootstrap
from grpo_run.watchdog.observation import RankState, Slot


class Exited(BaseException):
    """Raised instead of calling `os._exit`."""


@pytest.fixture
def run_main(
    run: Run,
    session: Any,
    make_settings: Callable[..., RankSettings],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Run:
    """Run the text of a script through `main`, and return the exit code. The test process is not changed."""

    def exit_process(code: int) -> None:
        raise Exited(code)

    monkeypatch.setattr(os, "_exit", exit_process)
    monkeypatch.setattr(atexit, "_run_exitfuncs", lambda: None)
    monkeypatch.setattr(threading, "_shutdown", lambda: None)
    monkeypatch.setattr(bootstrap, "open_session", lambda settings: session)
    for name in ("redirect_output", "_set_title", "_dump_stacks_to"):
        monkeypatch.setattr(bootstrap, name, lambda *arguments: None)
    monkeypatch.setattr(bootstrap, "_hide_inherited_modules", lambda *arguments: None)
    monkeypatch.setattr(bootstrap, "wrap_output", lambda forked: None)

    def execute(source: str) -> int:
        script = tmp_path / "train.py"
        script.write_text(textwrap.dedent(source))
        session.settings = make_settings(target=str(script))
        for name, value in session.settings.to_environment().items():
            monkeypatch.setenv(name, value)
        with pytest.raises(Exited) as exited:
            bootstrap.main()
        return int(exited.value.args[0])

    return execute


@pytest.mark.parametrize(
    ("source", "code"), [("x = 1", 0), ("from grpo_run.runtime.errors import Stopped\nraise Stopped(7)", 75)]
)
def test_a_completed_script_is_reported_as_done(
    run_main: Run,
    reading: Callable[[], Slot],
    events: Callable[[], list[dict[str, Any]]],
    source: str,
    code: int,
) -> None:
    """On the board and in the journal, before exit handlers run; also after an agreed stop."""
    assert run_main(source) == code
    assert reading().state is RankState.done
    assert [(record["event"], record["exit_code"]) for record in events()] == [("rank_completed", code)]


def test_the_board_says_that_a_script_has_returned_while_its_threads_run(
    run_main: Run, reading: Callable[[], Slot], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that never ends keeps the process; the supervisor then knows that the last line was run."""
    seen: list[RankState] = []
    monkeypatch.setattr(threading, "_shutdown", lambda: seen.append(reading().state))
    assert run_main("x = 1") == 0
    assert run_main("raise ValueError") == 1
    assert seen == [RankState.returned, RankState.failed]


def test_a_thread_that_trains_after_the_last_line_keeps_its_state(
    run_main: Run, session: Any, reading: Callable[[], Slot], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its ranks vote, and a stop or a hang concerns its `train()` call."""
    seen: list[RankState] = []
    monkeypatch.setattr(threading, "_shutdown", lambda: seen.append(reading().state))
    session.slot.state = RankState.training
    session.slot.publish()
    run_main("x = 1")
    assert seen == [RankState.training]


@pytest.mark.parametrize(
    "source", ["raise ValueError", "import sys\nsys.exit(3)", "import sys\nsys.exit(75)"]
)
def test_a_failed_script_is_not_reported_as_done(
    run_main: Run, reading: Callable[[], Slot], events: Callable[[], list[dict[str, Any]]], source: str
) -> None:
    """Also if the script itself exits with the code of an agreed stop."""
    assert run_main(source) != 0
    assert reading().state is RankState.failed
    assert events() == []


def test_exit_handlers_run_without_a_limit_at_a_stop(run_main: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loggers finish in them; `on_train_end`, in which some finish too, is not called at a stop."""
    in_main_thread: list[bool] = []
    monkeypatch.setattr(
        bootstrap.process_names,
        "run_exit_handlers",
        lambda: in_main_thread.append(threading.current_thread() is threading.main_thread()),
    )
    assert run_main("from grpo_run.runtime.errors import Stopped\nraise Stopped(7)") == 75
    assert in_main_thread == [True], "a thread would have a time limit"


@pytest.mark.parametrize(("seconds", "returns"), [(None, True), (5.0, True), (0.01, False)])
def test_a_function_is_awaited_until_its_deadline(seconds: float | None, returns: bool) -> None:
    """The caller continues after the time limit, if there is one."""
    end = threading.Event()
    if returns:
        end.set()
    assert bootstrap.with_deadline(end.wait, seconds) is returns
    end.set()
