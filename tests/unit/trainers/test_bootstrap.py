"""What a rank does with the script it is given. The script runs in this process; nothing is left behind."""

from __future__ import annotations

import atexit
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
from grpo_run.watchdog.observation import RankState, Slot

Run = Callable[..., int]


@pytest.fixture
def run(
    tmp_path: Path, session: Any, make_settings: Callable[..., RankSettings], monkeypatch: pytest.MonkeyPatch
) -> Run:
    """Runs a script's text as a rank would; returns the exit code."""
    monkeypatch.setattr(sys, "argv", sys.argv[:])
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    session.start = lambda: None
    monkeypatch.setattr(bootstrap, "install_guard", lambda session: None)

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
    """The error the rank wrote down."""
    value: dict[str, Any] = json.loads(Path(session.settings.error).read_text())
    return value


def test_a_script_that_ends_is_done(run: Run, session: Any) -> None:
    """Code 0, no error file."""
    assert run("x = 1") == 0
    assert not Path(session.settings.error).exists()


@pytest.mark.parametrize("module", [False, True])
def test_a_script_sees_what_python_would_show_it(run: Run, tmp_path: Path, module: bool) -> None:
    """Its name, its arguments, its folder first on the path, itself as `__main__`."""
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


def test_a_script_is_compiled_as_it_is_written(run: Run, tmp_path: Path) -> None:
    """Our own `from __future__` is ours: the script's annotations are the objects they name."""
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


def test_an_exception_is_written_with_its_place(
    run: Run, session: Any, reading: Callable[[], Slot], tmp_path: Path
) -> None:
    """Type, message, the user's line, and the board says that this rank failed."""
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


def test_the_place_is_the_users_line_not_the_librarys(run: Run, session: Any, tmp_path: Path) -> None:
    """The innermost frame outside installed libraries."""
    site = tmp_path / "site-packages"
    site.mkdir()
    (site / "some_library.py").write_text("def work():\n    raise RuntimeError('inside')\n")
    run(f"import sys\nsys.path.insert(0, {str(site)!r})\nimport some_library\nsome_library.work()\n")
    assert written(session)["location"][:2] == [str(tmp_path / "train.py"), 4]


def test_the_traceback_begins_with_the_users_frame(
    run: Run, session: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ours are no news, in the file and on the screen."""
    run("raise ValueError('x')")
    shown = capsys.readouterr().err
    for text in (written(session)["traceback"], shown):
        assert "ValueError: x" in text
        assert "bootstrap.py" not in text
        assert "runpy" not in text


def test_bad_syntax_is_told_as_python_tells_it(
    run: Run, session: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """With its line."""
    assert run("x = (\n") == 1
    assert written(session)["type"] == "SyntaxError"
    assert "train.py" in capsys.readouterr().err


def test_what_is_written_is_bounded(run: Run, session: Any) -> None:
    """A message of megabytes (a whole batch, say) does not fill the disk."""
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
def test_leaving_by_sys_exit_is_pythons(run: Run, statement: str, code: int) -> None:
    """The same codes."""
    assert run(f"import sys\n{statement}") == code


def test_a_text_given_to_sys_exit_is_shown(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """On standard error."""
    run("import sys\nsys.exit('no data')")
    assert "no data" in capsys.readouterr().err


def test_an_agreed_stop_is_75(run: Run, session: Any) -> None:
    """And no failure."""
    assert run("from grpo_run.runtime.errors import Stopped\nraise Stopped(7)") == 75
    assert not Path(session.settings.error).exists()


def test_an_agreed_stop_passes_through_the_scripts_own_handlers(run: Run) -> None:
    """`except Exception` does not hold it up, `finally` runs."""
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


def test_a_users_mistake_is_one_line_and_2(
    run: Run, session: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the launcher would have said it."""

    def start() -> None:
        raise ConfigError("--generation max_time: no such cap")

    session.start = start
    assert run("x = 1") == 2
    assert capsys.readouterr().err == "grpo-run: --generation max_time: no such cap\n"
    assert written(session)["type"] == "ConfigError"


def test_an_interrupt_is_written_down(run: Run, session: Any) -> None:
    """Whatever leaves the script."""
    assert run("raise KeyboardInterrupt") == 1
    assert written(session)["type"] == "KeyboardInterrupt"


def test_an_exception_without_a_text_is_still_reported(run: Run, session: Any) -> None:
    """Its own `__str__` may fail; the report must not fail with it."""
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


class Left(BaseException):
    """Instead of `os._exit`."""


@pytest.fixture
def whole(
    run: Run,
    session: Any,
    make_settings: Callable[..., RankSettings],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Run:
    """Runs a script's text from `main` to the exit code; this process itself is left as it is."""

    def leave(code: int) -> None:
        raise Left(code)

    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(atexit, "_run_exitfuncs", lambda: None)
    monkeypatch.setattr(threading, "_shutdown", lambda: None)
    monkeypatch.setattr(bootstrap, "open_session", lambda settings: session)
    for name in ("_redirect_output", "_set_title", "_arm_stacks"):
        monkeypatch.setattr(bootstrap, name, lambda argument: None)
    monkeypatch.setattr(bootstrap, "_refuse_inherited_cuda", lambda: None)
    monkeypatch.setattr(bootstrap, "_wrap_output", lambda forked: None)

    def execute(source: str) -> int:
        script = tmp_path / "train.py"
        script.write_text(textwrap.dedent(source))
        session.settings = make_settings(target=str(script))
        for name, value in session.settings.to_environment().items():
            monkeypatch.setenv(name, value)
        with pytest.raises(Left) as left:
            bootstrap.main()
        return int(left.value.args[0])

    return execute


@pytest.mark.parametrize(
    ("source", "code"),
    [("x = 1", 0), ("from grpo_run.runtime.errors import Stopped\nraise Stopped(7)", 75)],
)
def test_a_script_that_came_to_its_end_is_done(
    whole: Run,
    reading: Callable[[], Slot],
    events: Callable[[], list[dict[str, Any]]],
    source: str,
    code: int,
) -> None:
    """On the board and in the journal, before exit handlers run; an agreed stop is an end too."""
    assert whole(source) == code
    assert reading().state is RankState.done
    assert [(record["event"], record["exit_code"]) for record in events()] == [("rank_completed", code)]


@pytest.mark.parametrize(
    "source", ["raise ValueError", "import sys\nsys.exit(3)", "import sys\nsys.exit(75)"]
)
def test_a_script_that_failed_is_not_done(
    whole: Run, reading: Callable[[], Slot], events: Callable[[], list[dict[str, Any]]], source: str
) -> None:
    """Also when it chose the code of an agreed stop by itself: nothing was agreed on, nothing saved."""
    assert whole(source) != 0
    assert reading().state is RankState.failed
    assert events() == []


def test_a_deadline_is_kept() -> None:
    """What does not come back is given up."""
    never = threading.Event()
    assert bootstrap.with_deadline(never.wait, 0.01) is False
    never.set()


@pytest.mark.parametrize("seconds", [None, 5.0])
def test_what_comes_back_in_time_is_waited_for(seconds: float | None) -> None:
    """With a deadline or without."""
    called: list[int] = []
    assert bootstrap.with_deadline(lambda: called.append(1), seconds) is True
    assert called == [1]


LEAVES = """
    import sys

    def stop_here():
        sys.exit(0)

    stop_here()
"""


def test_leaving_in_the_middle_of_training_is_written_down(
    run: Run, session: Any, reading: Callable[[], Slot], tmp_path: Path
) -> None:
    """Well meant or not: code 0, no failure, and the line for those it leaves behind."""
    session.slot.state = RankState.training
    assert run(LEAVES) == 0
    error = written(session)
    assert error["type"] == "SystemExit"
    assert error["location"] == [str(tmp_path / "train.py"), 5, "stop_here"]
    assert reading().state is not RankState.failed


@pytest.mark.parametrize("state", [RankState.starting, RankState.between])
def test_leaving_outside_training_is_nobodys_business(run: Run, session: Any, state: RankState) -> None:
    """A script may end as it likes."""
    session.slot.state = state
    assert run(LEAVES) == 0
    assert not Path(session.settings.error).exists()


def test_leaving_with_an_agreed_stop_in_training_writes_nothing(run: Run, session: Any) -> None:
    """All ranks leave with it."""
    session.slot.state = RankState.training
    assert run("from grpo_run.runtime.errors import Stopped\nraise Stopped(7)") == 75
    assert not Path(session.settings.error).exists()


def test_a_print_that_a_full_disk_does_not_take_ends_no_script() -> None:
    """Python's own files raise, and a progress bar would end a training."""
    descriptor = os.open("/dev/full", os.O_WRONLY | os.O_CLOEXEC)
    try:
        with pytest.raises(OSError, match="No space left"):
            os.write(descriptor, b"lost")
        raw = bootstrap._Output(descriptor, "w", closefd=False)
        stream = io.TextIOWrapper(raw, "utf-8", write_through=True)
        print("lösung", file=stream, flush=True)
        assert raw.write(memoryview(b"ab").cast("H")) == 2
        raw.close()
    finally:
        os.close(descriptor)


def test_a_print_to_what_is_closed_is_an_error_as_ever(tmp_path: Path) -> None:
    """Only a full disk is passed over."""
    descriptor = os.open(tmp_path / "log", os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        raw = bootstrap._Output(descriptor, "w", closefd=False)
        with pytest.raises(OSError, match="Bad file descriptor"):
            raw.write(b"text")
    finally:
        os.close(descriptor)
