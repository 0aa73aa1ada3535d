"""A host that was cut off and held up in the middle of a save changes no checkpoint when it goes on.

The one of two hosts that has rank 0 is stopped at a random moment of a save, and its link is cut. A spare
takes its place, and while the newer attempt trains, the host's processes go on, still cut off. Then the link
is there again, and the host is the next spare. Where the hosts meet is served by a host of its own.
"""

from __future__ import annotations

import contextlib
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.hosts import PORT, Host, HostRun, hosts, missing
from support.references import undisturbed
from support.runs import SCRIPTS, digest
from support.trainer_and_loop import TRAINER

from grpo_run.runtime.checkpoints.digests import verify_digests
from grpo_run.runtime.checkpoints.fencing import WRITING
from grpo_run.runtime.checkpoints.manifest import read_manifest
from grpo_run.runtime.checkpoints.search import run_folders
from grpo_run.runtime.errors import CheckpointError

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())
SAVE_SECONDS, PUBLISH_SECONDS = 0.2, 0.05
"""About how long a save takes here until older checkpoints are removed, and the part after the ranks have
written."""
RARE_SECONDS = 10.0
"""A part of a save that is too short to be seen is given up for the beginning of one."""
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


def _signal(run: HostRun, number: int) -> None:
    """Send a signal to all processes of a host: the supervisor, its ranks, and what writes checkpoints."""
    run.host.call("sh", "-c", f"kill -{int(number)} -1")
    run.send_signal(number)  # nsenter, which is not on the host


SPARE = "as a spare"


def _began(run: HostRun) -> float:
    """When the host has started a rank last."""
    return max((float(one["time"]) for one in run.events("rank_started")), default=0.0)


def _main(runs: Sequence[HostRun], *, after: float = 0.0) -> HostRun:
    """Wait until a newer attempt has finished a step, and return the host that has its rank 0."""
    found: list[HostRun] = []

    def trains() -> bool:
        for run in runs:
            if run.process.poll() is not None:  # it could not reach the meeting place while it was cut off
                run.ended(75).start()
            started = run.events("rank_started")[-1:]
            if started and started[0]["rank"] == 0 and started[0]["time"] > after:
                attempt = started[0]["attempt"]
                if any(one["attempt"] == attempt for one in run.events("step_committed")):
                    found.append(run)
        return bool(found)

    _until(runs, trains)
    return found[0]


def _verify(output: Path) -> None:
    """Every checkpoint is complete; one may be removed meanwhile."""
    for path in output.glob("checkpoint-*"):
        with contextlib.suppress(CheckpointError):
            verify_digests(path, read_manifest(path).files)
            continue
        assert not path.exists(), path


def _cuts(folder: Path, seed: int, cuts: int, steps: int) -> None:
    chance = random.Random(seed)
    output = folder / "ours"
    script = (
        str(SCRIPTS / TRAINER), "--output-dir", "ours", "--max-steps", str(steps), "--save-steps", "2",
        "--save-total-limit", "3", "--step-seconds", "0.5",
    )  # fmt: skip
    with hosts(folder, 4) as made, meeting_place(made[0]):
        runs = [HostRun(host, folder, *script, options=("--max-restarts", "1000")) for host in made[1:]]
        for run in runs:
            run.start()
        main = _main(runs)
        for left in reversed(range(cuts)):
            others = [run for run in runs if run is not main]
            known = _published(runs)
            _until(others, lambda known=known: _published(runs) > known + 1)
            written = chance.choice((True, False))
            seldom = time.monotonic() + RARE_SECONDS
            _until(
                others,
                lambda written=written, seldom=seldom: _is_saving(
                    output, written=written and time.monotonic() < seldom
                ),
            )
            time.sleep(chance.uniform(0, PUBLISH_SECONDS if written else SAVE_SECONDS))
            _signal(main, signal.SIGSTOP)
            main.host.cut()
            newer = _main(others, after=_began(main))
            known = _published(others)
            _signal(main, signal.SIGCONT)
            _until(others, lambda known=known, others=others: _published(others) > known + 1)
            _verify(output)
            spare_before = main.printed().count(SPARE)
            main.host.join()
            if left:
                _until_spare(main, spare_before)
                main = newer
        for run in runs:
            if run is not main:
                run.ended(timeout_seconds=120.0 + steps)  # twice the time of all steps
        if main.process.poll() is None:
            main.kill_supervisor(signal.SIGTERM)
        # a spare may have been told before that the run has finished
        assert main.wait() in (0, 75), main.tail()
    steps_published = [one["step"] for run in runs for one in run.events("checkpoint_published")]
    assert len(steps_published) == len(set(steps_published)), sorted(steps_published)
    assert digest(output) == undisturbed(TRAINER, steps)
    assert [path.name for path in output.glob("[_.]*")] == []
    assert not (folder / "ours_grpo_run").exists()


def _published(runs: Sequence[HostRun]) -> int:
    return sum(len(run.events("checkpoint_published")) for run in runs)


def _until(runs: Sequence[HostRun], condition: Callable[[], bool], timeout_seconds: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        assert time.monotonic() < deadline, "\n".join(run.tail(3000) for run in runs)
        time.sleep(0.001)


def _until_spare(run: HostRun, before: int) -> None:
    """Wait until a host is a spare. It may have ended, because it could not reach the meeting place."""
    _until([run], lambda: run.process.poll() is not None or run.printed().count(SPARE) > before)
    if run.process.poll() is not None:
        run.ended(75).start()
        _until([run], lambda: run.printed().count(SPARE) > before)


def _is_saving(output: Path, *, written: bool) -> bool:
    """Whether a checkpoint is being written: from a snapshot in memory, or by the ranks themselves.

    Args:
        written: whether the parts of both ranks have been written, and only the digests are missing.
    """
    places = [output.glob(".checkpoint-*.partial-*")]
    places += [folder.glob(f"{WRITING}*/checkpoint-*") for folder in run_folders(output, "pair")]
    for path in (path for found in places for path in found):
        if not written or all((path / f"grpo_run/rank{rank}.safetensors").exists() for rank in (0, 1)):
            return True
    return False


@pytest.mark.full
@pytest.mark.parametrize(
    ("cuts", "steps"), [(1, 60), pytest.param(50, 3000, marks=pytest.mark.timeout(3600))]
)
def test_a_host_that_was_cut_off_during_a_save(tmp_path: Path, cuts: int, steps: int) -> None:
    """Whenever that is, all checkpoints stay whole, and the run ends in undisturbed weights."""
    _cuts(tmp_path, seed=cuts, cuts=cuts, steps=steps)
