"""Runs over several hosts go on from snapshots in the hosts' memory, in equal weights, and lose one step at
most.

The script saves nothing to disk before its last step, so what is not in memory begins anew.
"""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.hosts import Host, HostRun, hosts, missing, start_all
from support.references import undisturbed
from support.runs import SCRIPTS, digest
from support.trainer_and_loop import TRAINER

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())
STEPS, HELD = 16, 8


def _runs(
    made: Sequence[Host], folder: Path, *, endpoint: str = "node0", output: str = "ours"
) -> list[HostRun]:
    script = (
        str(SCRIPTS / TRAINER),
        "--output-dir",
        output,
        "--max-steps",
        str(STEPS),
        "--save-steps",
        "100",
    )
    options = ("--snapshot-every", "1")
    return [HostRun(host, folder, *script, options=options, endpoint=endpoint) for host in made]


def _ended(runs: Sequence[HostRun], folder: Path, code: int = 0) -> None:
    for run in runs:
        run.ended(code)
    if code == 0:
        assert digest(folder / "ours") == undisturbed(TRAINER, STEPS)


def _resumed_in_memory(run: HostRun, *, after: int) -> None:
    """The last attempt has resumed from a snapshot of this step or a later one."""
    resumed = run.events("resume_chosen")[-1]
    assert resumed["in_memory"], resumed
    assert resumed["step"] >= after, resumed


def test_a_killed_rank_repeats_no_step(tmp_path: Path) -> None:
    """All ranks load the snapshot of the last step; then one checkpoint of all ranks is on disk."""
    with hosts(tmp_path, 2) as made:
        pair = _runs(made, tmp_path)
        with pair[0].held(HELD):
            start_all(pair, HELD - 1)
            pair[1].kill(1)
        _ended(pair, tmp_path)
        for host in made:  # nothing of the run stays in the memory of a host
            host.call("sh", "-c", 'test -z "$(ls /dev/shm/grpo-run-*/)"')
    _resumed_in_memory(pair[0], after=HELD - 1)
    states = {path.name for path in (tmp_path / "ours" / f"checkpoint-{STEPS}").glob("rng_state_*.pth")}
    assert states == {"rng_state_0.pth", "rng_state_1.pth"}


@pytest.mark.full
def test_a_lost_host_loses_no_snapshot(tmp_path: Path) -> None:
    """Its part is on host 0, too, and it gets all of the snapshot when it is back with empty memory and an
    empty disk: the output directory is each host's own.
    """
    with hosts(tmp_path, 2) as made:
        output = made[0].disk / "ours"
        pair = _runs(made, tmp_path, output=str(output))
        with pair[0].held(HELD):
            start_all(pair)
            made[1].kill()
            time.sleep(3)
            made[1].boot()
            pair[1].start()
        for run in pair:
            run.ended()
        found = subprocess.check_output([*made[0].enter, "cat", str(output / "weights.sha256")], text=True)
        assert found.split()[0] == undisturbed(TRAINER, STEPS)
    _resumed_in_memory(pair[0], after=5)


@pytest.mark.full
def test_the_lost_first_host_loses_no_snapshot(tmp_path: Path) -> None:
    """Host 1 has the parts of both; the same commands go on from its memory, which stays meanwhile."""
    with hosts(tmp_path, 2) as made:
        pair = _runs(made, tmp_path)
        with pair[0].held(HELD):
            start_all(pair)
            made[0].kill()
            pair[1].ended(75)
            made[0].boot()
            for run in pair:
                run.start()
        _ended(pair, tmp_path)
    _resumed_in_memory(pair[0], after=5)


@pytest.mark.full
@pytest.mark.parametrize("spare", [2, 0], ids=["last", "first"])
def test_a_spare_gets_the_snapshot(spare: int, tmp_path: Path) -> None:
    """With `--nnodes 2` on three hosts. Hosts are numbered by their names, so the spare may get rank 0."""
    stays = 2 - spare
    with hosts(tmp_path, 3) as made:
        runs = _runs(made, tmp_path, endpoint=f"node{stays}")
        with runs[0].held(HELD):
            start_all([runs[stays], runs[1]])
            runs[spare].start_as_spare()
            made[1].kill()
            runs[spare].until_event("attempt_started")
        _ended([runs[stays], runs[spare]], tmp_path)
    _resumed_in_memory(runs[0], after=5)


@pytest.mark.full
def test_a_stop_writes_one_complete_checkpoint(tmp_path: Path) -> None:
    """A signal to any host; the same commands continue from it."""
    with hosts(tmp_path, 2) as made:
        pair = _runs(made, tmp_path)
        with pair[0].held(6):
            start_all(pair, 6)
            pair[1].kill_supervisor(signal.SIGTERM)
            pair[1].until_event("stop_requested")
        _ended(pair, tmp_path, 75)
        (manifest,) = tmp_path.glob("ours*/**/MANIFEST.json")
        states = {path.name for path in manifest.parent.glob("rng_state_*.pth")}
        assert states == {"rng_state_0.pth", "rng_state_1.pth"}
        for run in pair:
            run.start()
        _ended(pair, tmp_path)
    resumed = pair[0].events("resume_chosen")[-1]
    assert resumed["step"] >= 6
