"""Who takes part in a run over hosts: what is lost is declared soon, and what was cut off for 8 s is not."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from support.hosts import HostRun, hosts, missing, start_all
from support.references import undisturbed
from support.runs import SCRIPTS, digest
from support.trainer_and_loop import TRAINER

pytestmark = [pytest.mark.skipif(bool(missing()), reason=missing()), pytest.mark.full]
STEPS, HELD = 16, 10
SCRIPT = (str(SCRIPTS / TRAINER), "--output-dir", "ours", "--max-steps", str(STEPS), "--save-steps", "4")
DEAD_SECONDS, SILENT_SECONDS = 3.0, 10.0
HANDLED_SECONDS = 1.5
"""From the declaration of a loss to the incident, with evidence on disk."""
START_SECONDS = 180.0
WARM_SECONDS = 8.0
"""In which a spare imports what its ranks need, on a machine of two cores."""


def _equal(folder: Path) -> None:
    assert digest(folder / "ours") == undisturbed(TRAINER, STEPS)


def _with_spare(made: list, folder: Path) -> list[HostRun]:
    """Start a run on two hosts, and a third one that waits."""
    runs = [HostRun(host, folder, *SCRIPT) for host in made]
    start_all(runs[:2], HELD - 1, timeout_seconds=START_SECONDS)
    runs[2].start_as_spare()
    return runs


def test_a_spare_takes_no_place_during_a_cut_of_8_s(tmp_path: Path) -> None:
    """It goes on waiting; nothing is started twice."""
    with hosts(tmp_path, 3) as made:
        with HostRun(made[0], tmp_path, *SCRIPT).held(HELD):
            runs = _with_spare(made, tmp_path)
            made[1].cut()
            time.sleep(8.0)
            made[1].join()
            time.sleep(8.0)  # until what was sent meanwhile has arrived
        for run in runs[:2]:
            run.ended()
            assert "no faults" in run.printed()
            assert len(run.events("attempt_started")) == 1
        assert not runs[2].events("attempt_started")
    _equal(tmp_path)


def test_a_killed_supervisor_is_declared_within_3_s_and_replaced_by_a_spare(tmp_path: Path) -> None:
    """The loss is the fault, not the connections that it has closed."""
    with hosts(tmp_path, 3) as made:
        with HostRun(made[0], tmp_path, *SCRIPT).held(HELD):
            runs = _with_spare(made, tmp_path)
            time.sleep(WARM_SECONDS)
            runs[1].kill_supervisor()
            killed_at = time.monotonic()
            lost = runs[0].until_event("incident")
            declared_seconds = time.monotonic() - killed_at
            assert lost["sentence"] == "Host node1 is lost: its supervisor has ended."
            assert lost["cause"] == "node_lost"
            assert declared_seconds < DEAD_SECONDS
            runs[0].until_event("attempt_started", count=2)
            print(f"declared {declared_seconds:.1f} s, met {time.monotonic() - killed_at:.1f} s")
            assert time.monotonic() - killed_at - declared_seconds < DEAD_SECONDS
            runs[2].until_event("step_committed")
            print(f"step {time.monotonic() - killed_at:.1f} s")
        for run in (runs[0], runs[2]):
            run.ended()
    _equal(tmp_path)


def test_a_cut_of_60_s_ends_one_side_that_takes_part_again(tmp_path: Path) -> None:
    """The side of the endpoint waits, the other one ends with 75; both say what was."""
    with hosts(tmp_path, 2) as made:
        runs = [HostRun(host, tmp_path, *SCRIPT) for host in made]
        with runs[0].held(HELD):
            start_all(runs, HELD - 1, timeout_seconds=START_SECONDS)
            made[1].cut()
            cut_at = time.monotonic()
            runs[0].until_event("incident", cause="node_lost")
            print(f"declared {time.monotonic() - cut_at:.1f} s")
            assert time.monotonic() - cut_at < SILENT_SECONDS + HANDLED_SECONDS
            runs[1].ended(75)
            print(f"other side ended {time.monotonic() - cut_at:.1f} s")
            assert time.monotonic() - cut_at < SILENT_SECONDS + 5
            time.sleep(max(0.0, cut_at + 60 - time.monotonic()))
            assert "waiting for 1 of 2 hosts at node0:29500" in runs[0].printed()
            made[1].join()
            runs[1].start()
            runs[1].until_event("attempt_started", count=2)
        for run in runs:
            run.ended()
    _equal(tmp_path)
    assert "FAULT Host node1 is lost: it has not answered for 9 s" in runs[0].printed()
    assert "FAULT node0:29500, where the hosts meet, does not answer" in runs[1].printed()
    for run in runs:
        assert "1 fault recovered" in run.printed().strip().splitlines()[-1]


def test_a_host_that_gives_up_ends_the_run_on_all_hosts(tmp_path: Path) -> None:
    """With its code; the others name it and do not wait for it."""
    with hosts(tmp_path, 2) as made:
        runs = [
            HostRun(host, tmp_path, *SCRIPT, options=options)
            for host, options in zip(made, ((), ("--max-restarts", "0")), strict=True)
        ]
        with runs[0].held(HELD):
            start_all(runs, HELD - 1, timeout_seconds=START_SECONDS)
            runs[1].kill(1)
            killed_at = time.monotonic()
            for run in runs:
                run.ended(93)
            assert time.monotonic() - killed_at < SILENT_SECONDS + 5
    last = runs[0].printed().strip().splitlines()[-1]
    assert "Host node1 gave up: Rank 1 on host node1 was killed by SIGKILL" in last
    assert runs[0].status()["state"] == "failed"


def test_a_host_that_has_finished_does_not_wait_for_a_lost_one(tmp_path: Path) -> None:
    """Its ranks are done: it ends with 0, and not after the 300 s in which the others may end."""
    late = tmp_path / "ends_late.py"
    late.write_text(
        f"import os, runpy, sys, time\nsys.path.insert(0, {str(SCRIPTS)!r})\n"
        f"runpy.run_path({SCRIPT[0]!r}, run_name='__main__')\n"
        "time.sleep(300 * int(os.environ['RANK']))\n"
    )
    with hosts(tmp_path, 2) as made:
        runs = [HostRun(host, tmp_path, str(late), *SCRIPT[1:]) for host in made]
        for run in runs:
            run.start()
        runs[0].until_event("rank_completed", timeout_seconds=START_SECONDS)
        made[1].kill()
        killed_at = time.monotonic()
        runs[0].ended(0)
        assert time.monotonic() - killed_at < SILENT_SECONDS + 5
    _equal(tmp_path)
