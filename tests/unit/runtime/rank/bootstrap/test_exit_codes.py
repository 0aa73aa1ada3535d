"""A script ends with the exit code that Python gives, and an early exit is reported."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.builders.trainers.script_runs import Run, written

from grpo_run.watchdog.observation import RankState, Slot


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
def test_sys_exit_gives_the_exit_code_that_python_gives(
    run: Run, capsys: pytest.CaptureFixture[str], statement: str, code: int
) -> None:
    """Codes are taken modulo 256; a text is printed to standard error."""
    assert run(f"import sys\n{statement}") == code
    assert ("no data" in capsys.readouterr().err) is ("no data" in statement)


STOPS = """
    from grpo_run.runtime.errors import Stopped
    try:
        raise Stopped(7)
    except Exception:
        raise SystemExit(1)
"""


@pytest.mark.parametrize("state", [RankState.starting, RankState.training])
def test_an_agreed_stop_exits_with_75(run: Run, session: Any, state: RankState) -> None:
    """It is not a failure: all ranks stop together. The script's `except Exception` does not catch it."""
    session.slot.state = state
    assert run(STOPS) == 75
    assert not Path(session.settings.error).exists()


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
