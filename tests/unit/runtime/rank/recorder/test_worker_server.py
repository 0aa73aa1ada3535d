"""The worker server serves the Flight Recorder, and leaves the output of the script alone."""

from __future__ import annotations

import shutil
import sys
import tempfile

import pytest
import torch
import torch.distributed as dist

from grpo_run.runtime.board.board import Board
from grpo_run.runtime.rank.collective_recorder import Recorder
from grpo_run.runtime.rank.worker_server import start_worker_server
from grpo_run.runtime.supervisor.detection import _collective_records as collective_records
from grpo_run.watchdog.deadlocks.recording import parse_recording


def test_the_worker_server_serves_the_flight_recorder(
    installed: Recorder, board: Board, capfd: pytest.CaptureFixture[str]
) -> None:
    """To the client that the supervisor uses. Its own warning is suppressed, output of the script is not."""
    folder = tempfile.mkdtemp(dir="/tmp", prefix="g")
    server = start_worker_server(f"{folder}/s")
    try:
        print("the script's own", file=sys.stderr)
        dist.all_reduce(torch.ones(4))
        answers, failures = collective_records.fetch({0: f"{folder}/s"}, 20.0)
    finally:
        server.shutdown()
        shutil.rmtree(folder)
    assert failures == {}
    parse_recording(answers[0])
    said = capfd.readouterr().err
    assert "the script's own" in said
    assert "listening" not in said


def test_a_worker_server_that_cannot_start_raises(capfd: pytest.CaptureFixture[str]) -> None:
    """A RuntimeError; standard error is restored."""
    with pytest.raises(RuntimeError):
        start_worker_server("/nowhere/at/all/s")
    print("heard", file=sys.stderr)
    assert "heard" in capfd.readouterr().err
