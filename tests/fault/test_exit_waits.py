"""A rank that waits at exit for something alive is not ended."""

from __future__ import annotations

from pathlib import Path

from support.runs import SCRIPTS, Runs


def test_an_exit_handler_that_waits_for_a_helper_in_its_own_session_is_left_alone(
    runs: Runs, tmp_path: Path
) -> None:
    """The deadline of an idle process passes twice meanwhile."""
    run = (
        runs("--deadline-exit", "2", "--nproc-per-node", "2", str(SCRIPTS / "waits_at_exit.py"), "5")
        .start()
        .ended()
    )
    assert (tmp_path / "uploaded").exists()
    assert run.events("incident") == []
    assert run.status()["warnings"] == 0
