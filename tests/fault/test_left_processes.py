"""Whatever ranks start is gone before the next attempt and after the end, and nothing else is touched.

Temporary folders are gone after the end, too.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import pytest
from support.runs import SCRIPTS, Run, Runs, alive, free_port

LEAVES = str(SCRIPTS / "leaves_processes.py")
GONE_SECONDS = 30.0
SEEN_SECONDS = 2.0
"""The guardian looks every half second."""


def until_ready(run: Run, folder: Path) -> None:
    """Wait until rank 0 has started its processes; the next attempt is ready later."""
    deadline = time.monotonic() + 120.0
    while not (folder / "ready").exists():
        assert time.monotonic() < deadline, run.tail()
        assert run.process.poll() is None, run.tail()
        time.sleep(0.05)
    (folder / "ready").unlink()


def started(folder: Path) -> list[int]:
    """The pids of everything that the script has started so far."""
    return [int(line) for line in (folder / "started").read_text().split()]


def assert_gone(folder: Path, port: int, *, seconds: float = 0.0) -> None:
    """No process, no port and no shared memory is left after at most this time."""
    deadline = time.monotonic() + seconds
    while alive(started(folder)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert alive(started(folder)) == []
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", port))
    names = (folder / "memory").read_text().split() if (folder / "memory").exists() else []
    memory = [Path("/dev/shm") / name for name in names]
    while any(path.exists() for path in memory) and time.monotonic() < deadline:
        time.sleep(0.05)  # the resource tracker removes it once nobody is left
    assert not [path for path in memory if path.exists()]


def test_nothing_is_left_before_the_next_attempt_and_after_the_supervisors_death(
    runs: Runs, tmp_path: Path
) -> None:
    """A rank is killed, then the supervisor; the same command finishes.

    A process that was there before is not touched.
    """
    port = free_port()
    temporary = Path(tempfile.mkdtemp(dir="/tmp"))  # short: otherwise multiprocessing uses /tmp itself
    own = subprocess.Popen(["sleep", "600"], start_new_session=True)
    # cold, as a user starts it: what its death leaves is known by the environment that it began with
    run = runs(
        "--nproc-per-node", "1", LEAVES, "--port", str(port), "--attempts", "2", cold=True,
        environment={"TMPDIR": str(temporary)},
    ).start()  # fmt: skip
    try:
        until_ready(run, tmp_path)
        first = started(tmp_path)
        assert len(alive(first)) == len(first) == 6
        run.kill(0)
        until_ready(run, tmp_path)  # the server's port was free
        assert alive(first) == []
        (event,) = run.events("processes_ended")
        assert {one["pid"] for one in event["processes"]} == set(first)
        assert sum(one["killed"] for one in event["processes"]) >= 1
        (said,) = [line for line in run.output.read_text().splitlines() if "had started" in line]
        assert f"{first[1]} (sleep 600)" in said
        time.sleep(SEEN_SECONDS)
        run.process.kill()
        run.process.wait()
        assert_gone(tmp_path, port, seconds=GONE_SECONDS)
        run.cold = None
        run.start().ended()
        assert_gone(tmp_path, port)
        assert [event["by"] for event in run.events("processes_ended")] == ["supervisor", "guardian"]
        assert own.poll() is None
        # torch keeps its cache
        assert [one.name for one in temporary.iterdir() if not one.name.startswith("torchinductor_")] == []
    finally:
        own.kill()
        own.wait()
        shutil.rmtree(temporary)


HELPER = """
import subprocess, sys
subprocess.Popen([sys.executable, "-c", "import time\\nfor _ in range(60): time.sleep(0.1); open('noise', 'w').write('x' * 100000)\\nopen('uploaded', 'w')"], start_new_session=True)
subprocess.Popen(["sh", "-c", "exec -a kept-server sleep 600 & echo $! > kept; exec sleep 601"], start_new_session=True, executable="/bin/bash")
"""  # noqa: E501


@pytest.mark.full
def test_a_helper_that_works_is_waited_for_and_a_kept_one_is_left(runs: Runs, tmp_path: Path) -> None:
    """The rest is ended once it is idle. The run has finished."""
    (tmp_path / "train.py").write_text(HELPER)
    run = (
        runs(
            "--deadline-exit",
            "2",
            "--keep",
            "kept-server *",
            "--nproc-per-node",
            "1",
            str(tmp_path / "train.py"),
        )
        .start()
        .ended()
    )
    kept = int((tmp_path / "kept").read_text())
    try:
        assert (tmp_path / "uploaded").exists()
        assert alive([kept]) == [kept]
        (event,) = run.events("processes_ended")
        assert [one["command"] for one in event["processes"]] == ["sleep 601"]
        said = r"waiting for what the ranks have started: \d+ .* at \d\d:\d\d:\d\d at the earliest"
        assert re.search(said, run.output.read_text())
    finally:
        os.kill(kept, signal.SIGKILL)


@pytest.mark.full
def test_a_signal_ends_the_wait_for_helpers(runs: Runs, tmp_path: Path) -> None:
    """The run has finished nevertheless."""
    (tmp_path / "train.py").write_text("import subprocess\nsubprocess.Popen(['sleep', '600'])\n")
    run = runs("--nproc-per-node", "1", str(tmp_path / "train.py")).start()
    run.until_event("run_ended")
    time.sleep(0.2)
    assert run.process.poll() is None
    run.send_signal(signal.SIGTERM)
    run.ended(timeout_seconds=20)
    assert run.status()["state"] == "finished"
    (event,) = run.events("processes_ended")
    assert alive([one["pid"] for one in event["processes"]]) == []


KINDS = ("child", "session", "daemon", "server", "workers")


@pytest.mark.full
@pytest.mark.parametrize("number", range(50))
def test_fifty_faults_leave_nothing(number: int, runs: Runs, tmp_path: Path) -> None:
    """Kinds of processes, preloaded or fresh, drawn at random; ranks and supervisors are killed in turn."""
    drawn = random.Random(number)
    kinds = drawn.sample(KINDS, drawn.randint(1, len(KINDS)))
    port = free_port()
    run = runs(
        *(["--no-preload"] if number % 5 == 4 else []), "--nproc-per-node", str(1 + number % 2), LEAVES,
        "--port", str(port), "--attempts", "2", "--kinds", ",".join(kinds), cold=True,
    ).start()  # fmt: skip
    for kill in ("rank", "supervisor") if number % 2 else ("supervisor", "rank"):
        until_ready(run, tmp_path)
        before = started(tmp_path)
        if kill == "rank":
            run.kill(0, drawn.choice((signal.SIGKILL, signal.SIGSEGV)))
        else:
            # the guardian has no other proof of a program without an environment than having seen it
            time.sleep(drawn.uniform(SEEN_SECONDS, 3.0) if "session" in kinds else drawn.uniform(0.0, 1.0))
            run.process.kill()
            run.process.wait()
            assert_gone(tmp_path, port, seconds=GONE_SECONDS)
            run.cold = None  # no supervisor is killed any more
            run.start()
    run.ended()
    assert alive(before) == []
    assert_gone(tmp_path, port, seconds=GONE_SECONDS)
    staged = json.loads((run.directory / "run.json").read_text())["snapshot_directory"]
    assert staged is None or not Path(staged).exists()
