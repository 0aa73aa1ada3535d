"""Hundreds of clients that connect to the metrics port and say nothing."""

from __future__ import annotations

import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from support.runs import Runs, special

CONNECTIONS = 400
LIMITED = special("descriptors", "256")


@pytest.fixture
def descriptors() -> Iterator[None]:
    """Let this process hold all connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2 * CONNECTIONS:
        pytest.skip("this machine does not permit as many descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (2 * CONNECTIONS, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_run_survives_400_silent_connections_with_256_descriptors(
    runs: Runs, tmp_path: Path, descriptors: None
) -> None:
    """A scrape is answered or says why not, the ranks finish, and nothing is printed more than once."""
    (tmp_path / "train.py").write_text(
        "import pathlib, time\nwhile not pathlib.Path('end').exists():\n    time.sleep(0.05)\n"
    )
    run = runs(
        "--nproc-per-node", "2", str(tmp_path / "train.py"), metrics="127.0.0.1:0", program=LIMITED,
    ).start()  # fmt: skip
    run.until(lambda events: [event for event in events if event["event"] == "rank_started"], 120.0)
    (line,) = [line for line in run.printed().splitlines() if "metrics on http://" in line]
    address = line.partition("http://")[2].partition("/metrics")[0]
    host, port = address.split(":")
    silent: list[socket.socket] = []
    answers: list[httpx.Response] = []
    try:
        for number in range(CONNECTIONS):
            client = socket.socket()
            client.settimeout(30.0)
            client.connect((host, int(port)))
            silent.append(client)
            if number % 100 == 99:
                answers.append(httpx.get(f"http://{address}/metrics", timeout=30.0, trust_env=False))
        answers.append(httpx.get(f"http://{address}/metrics", timeout=30.0, trust_env=False))
        assert all(answer.status_code in (200, 503) for answer in answers)
        assert all(answer.text.count("\n") == 1 for answer in answers if answer.status_code == 503)
        assert answers[-1].status_code == 200
        (tmp_path / "end").touch()
        run.ended()
    finally:
        for client in silent:
            client.close()
    printed = [line.partition(" ")[2] for line in run.output.read_text().splitlines()]
    assert len(printed) == len(set(printed)), run.tail()
    assert "Traceback" not in run.printed()
