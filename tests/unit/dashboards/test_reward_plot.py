"""The picture of a run: its summary, the labels of recoveries, and no side effects on matplotlib."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.journal import as_events

from grpo_run.dashboards.reward_plot import draw_run, recovery_label, running_mean
from grpo_run.runtime.errors import RunDirectoryError
from grpo_run.runtime.history.recovery import Recovery

Record = dict[str, Any]
PNG = b"\x89PNG\r\n\x1a\n"


def _begun(step: int = 0, call: int = 1, time: float = 0.0) -> Record:
    return {"event": "train_started", "rank": 0, "step": step, "train_call": call, "time": time}


def _logged(step: int, reward: float | None, *, call: int = 1, length: float | None = 10.0) -> list[Record]:
    shared = {"step": step, "train_call": call, "time": float(step)}
    return [
        {"event": "step_logged", "rank": 0, "reward": reward, "completion_length": length, **shared},
        {"event": "step_committed", **shared},
    ]


def _killed(step: int) -> list[Record]:
    incident = {"event": "incident", "cause": "signal", "culprit": 1, "step": step, "failed_at": float(step)}
    return [{**incident, "time": step + 0.5}, {"event": "action", "action": "restart", "time": step + 0.5}]


def _rising(steps: int) -> list[Record]:
    return [_begun()] + [record for step in range(1, steps + 1) for record in _logged(step, step / steps)]


def test_the_summary_compares_the_first_and_the_last_twenty(tmp_path: Path) -> None:
    """The summary covers the last train() call, and the picture is a PNG at the given path."""
    summary = draw_run(as_events(_rising(100)), tmp_path / "run.png")
    assert (summary.steps, summary.compared_steps, summary.recoveries) == (100, 20, 0)
    assert summary.first_reward == pytest.approx(sum(range(1, 21)) / 2000)
    assert summary.last_reward == pytest.approx(sum(range(81, 101)) / 2000)
    assert summary.path.read_bytes().startswith(PNG)
    os.umask(umask := os.umask(0o022))
    assert summary.path.stat().st_mode & 0o777 == 0o644 & ~umask
    assert [path.name for path in tmp_path.iterdir()] == ["run.png"]


def test_without_matplotlib_there_are_numbers_and_no_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in `grpo-run demo` without the extra."""
    drawn = draw_run(as_events(_rising(100)), tmp_path / "run.png")
    (tmp_path / "run.png").unlink()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    summary = draw_run(as_events(_rising(100)), tmp_path / "run.png")
    assert summary.path is None
    assert (summary.first_reward, summary.steps) == (drawn.first_reward, drawn.steps)
    assert not (tmp_path / "run.png").exists()


def test_the_summary_of_a_short_run_compares_all_its_steps(tmp_path: Path) -> None:
    """With three steps the first and last steps are the same; one step is enough for a picture."""
    summary = draw_run(as_events(_rising(3)), tmp_path / "run.png")
    assert (summary.compared_steps, summary.first_reward) == (3, summary.last_reward)
    assert draw_run(as_events(_rising(1)), tmp_path / "run.png").steps == 1


def test_only_the_last_rewarded_call_is_drawn(tmp_path: Path) -> None:
    """A warm start logs no reward; of two GRPO calls the last is drawn."""
    records = [_begun(), *_logged(1, None), *_logged(2, 0.1), _begun(call=2), *_logged(1, 0.9, call=2)]
    summary = draw_run(as_events(records), tmp_path / "run.png")
    assert (summary.steps, summary.first_reward) == (1, 0.9)
    records += [_begun(call=3), *_logged(1, None, call=3)]
    assert draw_run(as_events(records), tmp_path / "run.png").first_reward == 0.9


def test_a_recovery_is_drawn_in_its_own_train_call(tmp_path: Path) -> None:
    """A recovery during the warm start is counted, but not marked on the axis of the GRPO call."""
    records = [_begun(), *_logged(1, None), *_killed(1), _begun(), *_logged(1, None), _begun(call=2)]
    records += [*_logged(1, 0.5, call=2), *_logged(2, 0.5, call=2), *_killed(2), _begun(step=1, call=2)]
    records += _logged(2, 0.5, call=2)
    assert draw_run(as_events(records), tmp_path / "run.png").recoveries == 2


def test_a_journal_without_rewards_is_refused(tmp_path: Path) -> None:
    """A journal without rewards is an error, and no file is written."""
    for records in ([], [_begun(), *_logged(1, None)]):
        with pytest.raises(RunDirectoryError, match="no rewards"):
            draw_run(as_events(records), tmp_path / "run.png")
    assert list(tmp_path.iterdir()) == []


def test_an_unwritable_path_is_an_error(tmp_path: Path) -> None:
    """The error names the path, and no temporary file remains."""
    with pytest.raises(RunDirectoryError, match=r"none/run\.png"):
        draw_run(as_events(_rising(2)), tmp_path / "none" / "run.png")
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(RunDirectoryError, match=r"folder\.png"):
        draw_run(as_events(_rising(2)), tmp_path / "folder.png")
    assert [path.name for path in tmp_path.iterdir()] == ["folder.png"]


@pytest.mark.parametrize(
    ("changes", "label"),
    [
        ({}, "rank 1 killed · recovered in 1.1 s · 3 steps repeated"),
        ({"lost_steps": 1}, "rank 1 killed · recovered in 1.1 s · 1 step repeated"),
        ({"lost_steps": None}, "rank 1 killed · recovered in 1.1 s"),
        ({"recovery_seconds": None, "lost_steps": None}, "rank 1 killed · not recovered"),
        ({"cause": "exception"}, "rank 1 failed · recovered in 1.1 s · 3 steps repeated"),
        ({"cause": "gpu_oom", "rank": None}, "gpu oom · recovered in 1.1 s · 3 steps repeated"),
    ],
)
def test_recovery_label(changes: Record, label: str) -> None:
    """The label has rank, fault, recovery time and repeated steps, as far as they are known."""
    known: Record = {
        "cause": "signal", "rank": 1, "step": 8, "action": "restart", "recovery_seconds": 1.1, "lost_steps": 3
    }  # fmt: skip
    assert recovery_label([Recovery(**(known | changes))]) == label


def test_many_recoveries_share_one_label() -> None:
    """The shared label counts recovered failures separately from all failures."""
    recoveries = [
        Recovery(cause="signal", rank=1, step=step, action="restart", recovery_seconds=1.0, lost_steps=2)
        for step in (30, 10, 20, 40)
    ]
    recoveries[-1].recovery_seconds = None
    assert recovery_label(recoveries) == "4 failures · 3 recovered in 3.0 s · 8 steps repeated"
    assert recovery_label([]) == ""


def test_the_running_mean_is_over_the_values_around_each() -> None:
    """Over fewer at both ends, and over more in a long run."""
    means = running_mean(np.arange(20.0))
    assert (means[0], means[10], means[-1]) == (2.5, 10.0, 16.5)
    assert running_mean(np.arange(5000.0))[0] == 25.0


@pytest.mark.parametrize("kind", ["negative", "no lengths", "many failures"])
def test_unusual_runs_are_drawn(kind: str, tmp_path: Path) -> None:
    """Negative rewards, missing lengths and many failures can be drawn."""
    records = [_begun()]
    for step in range(1, 61):
        reward = -2 + step / 10 if kind == "negative" else step / 60
        records += _logged(step, reward, length=None if kind == "no lengths" else 12.0 + step)
        if kind == "many failures" and step % 8 == 0:
            records += [*_killed(step), _begun(step=step - 4), *_logged(step, reward)]
    assert draw_run(as_events(records), tmp_path / "run.png").path.read_bytes().startswith(PNG)


def test_drawing_does_not_change_matplotlib(tmp_path: Path) -> None:
    """Settings are unchanged, no GUI backend is selected, and matplotlib is imported at the first picture."""
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from grpo_run.dashboards.reward_plot import draw_run\n"
        "assert 'matplotlib' not in sys.modules\n"
        "import matplotlib as mpl\n"
        "mpl.rcParams['font.size'] = 17\n"
        # Reading the backend would select one.
        "settings = lambda: {key: mpl.rcParams[key] for key in mpl.rcParams if key != 'backend'}\n"
        "before = settings()\n"
        "from grpo_run.runtime.history.events import StepLogged\n"
        "logged = StepLogged(rank=0, reward=0.5, step=1, train_call=1, time=1.0)\n"
        f"draw_run([logged], Path({str(tmp_path / 'run.png')!r}))\n"
        "assert settings() == before\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    command = [sys.executable, "-P", "-c", code]
    finished = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert finished.returncode == 0, finished.stderr
