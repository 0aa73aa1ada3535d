"""Missing observations are reported as unknown and never cause a restart on their own."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
from faults import fault
from support.references import undisturbed
from support.runs import SCRIPTS, Runs, digest

GRPO = str(SCRIPTS / "grpo.py")


def test_unreadable_flight_recorder_is_a_warning_without_incident(runs: Runs) -> None:
    """A slow rank whose Flight Recorder socket is gone causes a warning, no incident, and a finished run."""
    run = runs(
        *fault("slow", rank=1, step=12, seconds=3), "--nproc-per-node", "2", GRPO, "--output-dir", "out",
        "--max-steps", "20", "--save-steps", "10", "--step-seconds", "0.1",
    ).start()  # fmt: skip
    run.until_step(4)
    for rank in (0, 1):
        sockets = psutil.Process(run.pid(rank)).net_connections(
            "unix"
        )  # its directory depends on the path's length
        (socket,) = (Path(socket.laddr) for socket in sockets if f"rank{rank}.sock" in str(socket.laddr))
        socket.unlink()
    run.ended()
    assert run.events("incident") == []
    texts = [event["text"] for event in run.events("warning")]
    assert any("cannot see all of rank" in text and "unknown" in text for text in texts), texts


def test_truncated_board_costs_at_most_one_attempt(runs: Runs, tmp_path: Path) -> None:
    """After truncation to zero bytes, the supervisor creates a new board; the final weights are equal."""
    steps = ("--max-steps", "16", "--save-steps", "4")
    run = runs(
        "--nproc-per-node", "2", GRPO, "--output-dir", "ours", *steps, "--step-seconds", "0.1",
    ).start()  # fmt: skip
    run.until_step(6)
    os.truncate(run.directory / "board.mmap", 0)
    run.ended()
    assert digest(tmp_path / "ours") == undisturbed("grpo.py", 16)
    assert run.status()["attempts"] == 2
