"""Run the text of a script as a rank does."""

from __future__ import annotations

import functools
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.builders.trainers.script_runs import Run

from grpo_run.runtime.launch.rank_settings import RankSettings
from grpo_run.runtime.rank import bootstrap
from grpo_run.runtime.rank.hooks import attach
from grpo_run.runtime.rank.session import Session


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
    monkeypatch.setattr(attach, "install_guard", lambda session, features: None)

    def execute(source: str, *arguments: str, module: bool = False) -> int:
        script = tmp_path / "train.py"
        script.write_text(textwrap.dedent(source))
        if module:
            monkeypatch.chdir(tmp_path)
        target = "train" if module else str(script)
        session.settings = make_settings(target=target, arguments=arguments, module=module)
        return bootstrap._run(session.settings, session)[0]

    return execute
