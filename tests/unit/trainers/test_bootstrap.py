"""How a rank runs its script, and how it reports the end. The scripts run in the test process."""

from __future__ import annotations

import atexit
import functools
import io
import json
import os
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grpo_run.runtime.errors import ConfigError
from grpo_run.runtime.launch.rank_settings import RankSettings
from grpo_run.trainers import bootstrap
from grpo_run.trainers.hooks import attach
from grpo_run.trainers.rank.output import RankOutput
from grpo_run.trainers.rank.session import Session
from grpo_run.watchdog.observation import RankState, Slot

Run = Callable[..., int]


@pytest.fixture
def run(
    tmp_path: Path, session: Any, make_settings: Callable[..., RankSettings], monkeypatch: pytest.MonkeyPatch
) -> Run:
    """Run the text of a script as a rank does, and return the exit code."""
    monkeypatch.setattr(sys, "argv", sys.argv[:])
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    session.start = lambda: None
    session.script_returned = functools.partial(Session.script_returned, session)
    session.script_raised = functools.partial(Session.script_raised, session)
    monkeypatch.setattr(attach, "install_guard", lambda session: None)

    def execute(source: str, *arguments: str, module: bool = False) -> int:
        script = tmp_path / "train.py"
        script.write_text(textwrap.dedent(source))
        if module:
            monkeypatch.chdir(tmp_path)
        target = "train" if module else str(script)
        session.settings = make_settings(target=target, arguments=arguments, module=module)
        return bootstrap._run(session.settings, session)[0]

    return execute


def written(session: Any) -> dict[str, Any]:
    """Return the content of the rank's error file."""
    value: dict[str, Any] = json.loads(Path(session.settings.error).read_text())
    return value


def test_a_script_that_returns_exits_with_0(run: Run, session: Any) -> None:
    """No error file is written."""
    assert run("x = 1") == 0
    assert not Path(session.settings.error).exists()


@pytest.mark.parametrize("module", [False, True])
def test_a_script_sees_what_python_would_set_up(run: Run, tmp_path: Path, module: bool) -> None:
    """Its `__name__`, its arguments, its directory first on `sys.path`, and itself as `__main__`."""
    code = run(
        """
        import json, sys
        import __main__
        from pathlib import Path
        Path(__file__).with_name("seen.json").write_text(json.dumps(
            [__name__, sys.argv[1:], sys.path[0], sys.argv[0], getattr(__main__, "marker", None) or "unset"]
        ))
        """,
        "--lr", "1e-6", "", module=module,
    )  # fmt: skip
    assert code == 0
    name, arguments, folder, argv0, _ = json.loads((tmp_path / "seen.json").read_text())
    assert (name, arguments) == ("__main__", ["--lr", "1e-6", ""])
    assert Path(folder).resolve() == tmp_path.resolve()
    assert Path(argv0).name == "train.py"


def test_a_script_is_compiled_without_future_imports(run: Run, tmp_path: Path) -> None:
    """The bootstrap's own `from __future__` does not apply: annotations are evaluated."""
    code = run(
        """
        from pathlib import Path
        class Arguments:
            steps: int = 1
        Path(__file__).with_name("seen.txt").write_text(repr(Arguments.__annotations__))
        """
    )
    assert code == 0
    assert (tmp_path / "seen.txt").read_text() == "{'steps': <class 'int'>}"


def test_an_exception_is_reported_with_its_location(
    run: Run, session: Any, reading: Callable[[], Slot], tmp_path: Path
) -> None:
    """The error file has type, message and the user's line; the board shows the rank as failed."""
    code = run(
        """
        def reward():
            raise KeyError("score")

        reward()
        """
    )
    assert code == 1
    error = written(session)
    assert (error["type"], error["message"]) == ("KeyError", "'score'")
    assert error["location"] == [str(tmp_path / "train.py"), 3, "reward"]
    assert reading().state is RankState.failed


def test_the_location_is_in_the_users_code(run: Run, session: Any, tmp_path: Path) -> None:
    """The innermost frame outside installed libraries."""
    site = tmp_path / "site-packages"
    site.mkdir()
    (site / "some_library.py").write_text("def work():\n    raise RuntimeError('inside')\n")
    run(f"import sys\nsys.path.insert(0, {str(site)!r})\nimport some_library\nsome_library.work()\n")
    assert written(session)["location"][:2] == [str(tmp_path / "train.py"), 4]


def test_the_traceback_starts_at_the_users_frame(
    run: Run, session: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Frames of the bootstrap are omitted, in the error file and on standard error."""
    run("raise ValueError('x')")
    shown = capsys.readouterr().err
    for text in (written(session)["traceback"], shown):
        assert "ValueError: x" in text
        assert "bootstrap.py" not in text
        assert "runpy" not in text


def test_a_syntax_error_is_printed_as_python_prints_it(
    run: Run, session: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """The output includes the line."""
    assert run("x = (\n") == 1
    assert written(session)["type"] == "SyntaxError"
    assert "train.py" in capsys.readouterr().err


def test_the_error_file_is_bounded(run: Run, session: Any) -> None:
    """A message of megabytes, such as a whole batch, does not fill the disk."""
    run("raise ValueError('x' * 1_000_000)")
    assert len(Path(session.settings.error).read_bytes()) < 100_000


@pytest.mark.parametrize(
    ("statement", "code"),
    [
        ("sys.exit()", 0),
        ("sys.exit(0)", 0),
        ("sys.exit(3)", 3),
        ("sys.exit('no data')", 1),
        ("sys.exit(True)", 1),
    ],
)
def test_sys_exit_gives_the_exit_code_that_python_gives(run: Run, statement: str, code: int) -> None:
    """Codes are taken modulo 256."""
    assert run(f"import sys\n{statement}") == code


def test_a_text_given_to_sys_exit_is_printed(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """It is printed to standard error."""
    run("import sys\nsys.exit('no data')")
    assert "no data" in capsys.readouterr().err


def test_an_agreed_stop_exits_with_75(run: Run, session: Any) -> None:
    """It is not a failure."""
    assert run("from grpo_run.runtime.errors import Stopped\nraise Stopped(7)") == 75
    assert not Path(session.settings.error).exists()


def test_an_agreed_stop_passes_through_the_scripts_own_handlers(run: Run) -> None:
    """`except Exception` does not catch it, and `finally` blocks run."""
    code = run(
        """
        from grpo_run.runtime.errors import Stopped
        try:
            raise Stopped(7)
        except Exception:
            raise SystemExit(1)
        """
    )
    assert code == 75


def test_a_usage_error_is_one_line_and_exits_with_2(
    run: Run, session: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command line reports usage errors in the same way."""

    def start() -> None:
        raise ConfigError("--generation max_time: unknown cap")

    session.start = start
    assert run("x = 1") == 2
    assert capsys.readouterr().err == "grpo-run: --generation max_time: unknown cap\n"
    assert written(session)["type"] == "ConfigError"


def test_a_keyboard_interrupt_is_reported(run: Run, session: Any) -> None:
    """Like any exception that ends the script."""
    assert run("raise KeyboardInterrupt") == 1
    assert written(session)["type"] == "KeyboardInterrupt"


def test_an_exception_without_a_message_is_reported(run: Run, session: Any) -> None:
    """Its own `__str__` may raise."""
    code = run(
        """
        class Odd(Exception):
            def __str__(self):
                raise RuntimeError("no text")
        raise Odd
        """
    )
    assert code == 1
    assert written(session)["type"] == "Odd"


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
        monkeypatch.setattr(bootstrap, name, lambda argument: None)
    monkeypatch.setattr(bootstrap, "_hide_inherited_modules", lambda settings: None)
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
    ("source", "code"),
    [("x = 1", 0), ("from grpo_run.runtime.errors import Stopped\nraise Stopped(7)", 75)],
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
        bootstrap.upstream,
        "run_exit_handlers",
        lambda: in_main_thread.append(threading.current_thread() is threading.main_thread()),
    )
    assert run_main("from grpo_run.runtime.errors import Stopped\nraise Stopped(7)") == 75
    assert in_main_thread == [True], "a thread would have a time limit"


def test_a_function_that_does_not_return_is_abandoned() -> None:
    """The caller continues after the time limit."""
    never = threading.Event()
    assert bootstrap.with_deadline(never.wait, 0.01) is False
    never.set()


@pytest.mark.parametrize("seconds", [None, 5.0])
def test_a_function_that_returns_in_time_is_awaited(seconds: float | None) -> None:
    """The test covers calls with and without a time limit."""
    called: list[int] = []
    assert bootstrap.with_deadline(lambda: called.append(1), seconds) is True
    assert called == [1]


EXITS = """
    import sys

    def stop_here():
        sys.exit(0)

    stop_here()
"""


def test_sys_exit_0_during_training_is_reported(
    run: Run, session: Any, reading: Callable[[], Slot], tmp_path: Path
) -> None:
    """The exit code stays 0, and the error file names the line for the peers."""
    session.slot.state = RankState.training
    assert run(EXITS) == 0
    error = written(session)
    assert error["type"] == "SystemExit"
    assert error["location"] == [str(tmp_path / "train.py"), 5, "stop_here"]
    assert reading().state not in (RankState.failed, RankState.done)


@pytest.mark.parametrize("state", [RankState.starting, RankState.between])
def test_sys_exit_0_outside_training_is_not_reported(run: Run, session: Any, state: RankState) -> None:
    """A script may end at any time."""
    session.slot.state = state
    assert run(EXITS) == 0
    assert not Path(session.settings.error).exists()


def test_an_agreed_stop_during_training_writes_no_error_file(run: Run, session: Any) -> None:
    """All ranks stop together."""
    session.slot.state = RankState.training
    assert run("from grpo_run.runtime.errors import Stopped\nraise Stopped(7)") == 75
    assert not Path(session.settings.error).exists()


def test_printing_to_a_full_disk_does_not_raise() -> None:
    """Python's own streams raise, and a progress bar would end training."""
    descriptor = os.open("/dev/full", os.O_WRONLY | os.O_CLOEXEC)
    try:
        with pytest.raises(OSError, match="No space left"):
            os.write(descriptor, b"lost")
        raw = RankOutput(descriptor, "w", closefd=False)
        stream = io.TextIOWrapper(raw, "utf-8", write_through=True)
        print("lösung", file=stream, flush=True)
        assert raw.write(memoryview(b"ab").cast("H")) == 2
        raw.close()
    finally:
        os.close(descriptor)


def test_other_errors_of_printing_are_raised(tmp_path: Path) -> None:
    """Only a full disk is tolerated."""
    descriptor = os.open(tmp_path / "log", os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        raw = RankOutput(descriptor, "w", closefd=False)
        with pytest.raises(OSError, match="Bad file descriptor"):
            raw.write(b"text")
    finally:
        os.close(descriptor)


def test_a_usage_error_in_another_thread_ends_the_rank(
    run: Run, session: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Python ends the thread only, and the script would finish as if nothing had happened."""
    codes: list[int] = []
    monkeypatch.setattr(bootstrap, "_leave", codes.append)
    run(
        "import threading\n"
        "from grpo_run.runtime.errors import ConfigError\n"
        "def fail():\n    raise ConfigError('only in the main thread')\n"
        "thread = threading.Thread(target=fail)\nthread.start()\nthread.join()\n"
    )
    assert codes == [2]
    assert written(session)["type"] == "ConfigError"
    assert "grpo-run: only in the main thread" in capsys.readouterr().err
