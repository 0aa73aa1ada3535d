"""An error is reported with its type, its message and a line of the user's code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.builders.trainers.script_runs import Run, written

from grpo_run.runtime.errors import ConfigError
from grpo_run.runtime.rank import bootstrap
from grpo_run.watchdog.observation import RankState, Slot


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


ODD = """
    class Odd(Exception):
        def __str__(self):
            raise RuntimeError("no text")
    raise Odd
"""


@pytest.mark.parametrize(
    ("source", "kind", "shown"),
    [
        ("raise ValueError('x')", "ValueError", "ValueError: x"),
        ("x = (\n", "SyntaxError", "train.py"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt", "KeyboardInterrupt"),
        (ODD, "Odd", "Odd"),
    ],
)
def test_any_exception_that_ends_the_script_is_printed_and_reported(
    run: Run, session: Any, capsys: pytest.CaptureFixture[str], source: str, kind: str, shown: str
) -> None:
    """Without the frames of the bootstrap that called it; its own `__str__` may raise."""
    assert run(source) == 1
    error = written(session)
    assert error["type"] == kind
    for text in (error["traceback"], capsys.readouterr().err):
        assert shown in text
        assert kind == "SyntaxError" or ("bootstrap.py" not in text and "runpy" not in text)


def test_the_error_file_is_bounded(run: Run, session: Any) -> None:
    """A message of megabytes, such as a whole batch, does not fill the disk."""
    run("raise ValueError('x' * 1_000_000)")
    assert len(Path(session.settings.error).read_bytes()) < 100_000


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
