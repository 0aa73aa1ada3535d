"""What `launch` leaves alone in its process. Real launches: `integration/test_launch_call.py`."""

from __future__ import annotations

import pytest

from grpo_run.runtime.errors import UsageError
from grpo_run.runtime.launching.launch import RunRequest, launch
from grpo_run.runtime.processes import forkserver
from grpo_run.runtime.upstream import process_names


@pytest.mark.parametrize(("server", "stops"), [(None, 1), (4711, 0)])
@pytest.mark.usefixtures("here")
def test_a_forkserver_of_the_program_goes_on(
    monkeypatch: pytest.MonkeyPatch, server: int | None, stops: int
) -> None:
    """Only one that the launch has started is stopped."""
    stopped: list[float] = []
    monkeypatch.setattr(process_names, "forkserver_pid", lambda: server)
    monkeypatch.setattr(forkserver, "stop_server", stopped.append)
    with pytest.raises(UsageError, match=r"script missing\.py does not exist"):
        launch(RunRequest(target="missing.py"))
    assert len(stopped) == stops
