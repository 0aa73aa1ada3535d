"""A host that was cut off and held up in the middle of a save changes no checkpoint when it goes on.

The one of two hosts that has rank 0 is stopped at a random moment of a save, and its link is cut. A spare
takes its place, and while the newer attempt trains, the host's processes go on, still cut off. Then the link
is there again, and the host is the next spare. Where the hosts meet is served by a host of its own.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.hosts import PORT, Host, HostRun, hosts, missing
from support.references import undisturbed
from support.runs import SCRIPTS, digest
from support.trainer_and_loop import TRAINER

from grpo_run.runtime.checkpoints.digests import verify_digests
from grpo_run.runtime.checkpoints.manifest import read_manifest

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())
SAVE_SECONDS = 0.2
"""About how long a save takes here, until the checkpoint is published and older ones are removed."""
STORE = (
    "import time; from torch.distributed import TCPStore;"
    f" store = TCPStore('node0', {PORT}, is_master=True, wait_for_workers=False); time.sleep(1e6)"
)


@contextmanager
def meeting_place(host: Host) -> Iterator[None]:
    """Serve the store of the rendezvous on a host."""
    with subprocess.Popen([*host.enter, sys.executable, "-c", STORE], stdin=subprocess.DEVNULL) as server:
        try:
            yield
        finally:
            server.kill()


def _pids(run: HostRun) -> list[int]:
    """The supervisor of a host and its ranks, as the host knows them."""
    supervisor = run.events("run_started")[-1]["supervisor_pid"]
    attempt = run.events("attempt_started")[-1]["attempt"]
    ranks = [one["pid"] for one in run.events("rank_started") if one["attempt"] == attempt]
    return [supervisor, *ranks]


def _signal(run: HostRun, pids: Sequence[int], number: int) -> None:
    for pid in pids:
        subprocess.run([*run.host.enter, "kill", f"-{number}", str(pid)], capture_output=True, check=False)


def _main(runs: Sequence[HostRun]) -> HostRun:
    """The host that has rank 0 in the newest attempt."""
    started = [
        (one["time"], number)
        for number, run in enumerate(runs)
        for one in run.events("rank_started")
        if one["rank"] == 0
    ]
    return runs[max(started)[1]]


def _check(output: Path) -> list[int]:
    """Verify every checkpoint; return the steps."""
    steps = []
    for path in output.glob("checkpoint-*"):
        verify_digests(path, read_manifest(path).files)
        steps.append(int(path.name.rpartition("-")[2]))
    return sorted(steps)


def _cuts(folder: Path, seed: int, cuts: int, steps: int) -> None:
    chance = random.Random(seed)
    output = folder / "ours"
    script = (
        str(SCRIPTS / TRAINER), "--output-dir", "ours", "--max-steps", str(steps), "--save-steps", "2",
        "--save-total-limit", "3", "--step-seconds", "0.2",
    )  # fmt: skip
    options = ("--max-restarts", "1000")
    with hosts(folder, 4) as made, meeting_place(made[0]):
        runs = [HostRun(host, folder, *script, options=options) for host in made[1:]]
        for run in runs:
            run.start()
        for number in range(cuts):
            _wait(runs, lambda: sum(len(run.events("step_committed")) for run in runs) > 0)
            main = _main(runs)
            main.until_step(2 + max(_check(output), default=0))
            _until_saving(output)
            time.sleep(chance.uniform(0, SAVE_SECONDS))
            pids = _pids(main)
            _signal(main, pids, signal.SIGSTOP)
            main.host.cut()
            others = [run for run in runs if run is not main]
            seen = [len(run.events("resume_chosen")) for run in others]
            _wait(
                others,
                lambda seen=seen, others=others: [len(run.events("resume_chosen")) for run in others] != seen,
            )
            newer = _main(others)
            newer.until_step(newer.events("resume_chosen")[-1]["step"] + 1)
            published = _published(others)
            _signal(main, pids, signal.SIGCONT)
            _wait(others, lambda published=published, others=others: _published(others) > published)
            _check(output)
            main.host.join()
        for run in runs:
            run.ended()
    assert digest(output) == undisturbed(TRAINER, steps)


def _published(runs: Sequence[HostRun]) -> int:
    return sum(len(run.events("checkpoint_published")) for run in runs)


def _wait(runs: Sequence[HostRun], condition: object, timeout_seconds: float = 90.0) -> None:
    deadline = time.monotonic() + timeout_seconds
    while not condition():  # type: ignore[operator]
        said = "\n".join(run.tail(2000) for run in runs)
        assert time.monotonic() < deadline, said
        time.sleep(0.05)


def _until_saving(output: Path) -> None:
    deadline = time.monotonic() + 60
    while not any(output.glob("_grpo_run/*/.writing-*")) and not any(
        output.parent.glob("ours_grpo_run/*/.writing-*")
    ):
        assert time.monotonic() < deadline, "nothing is saved"
        time.sleep(0.001)


def test_a_host_that_was_cut_off_during_a_save(tmp_path: Path) -> None:
    """Twice."""
    _cuts(tmp_path, 1, 2, 60)
