"""Processes that a rank forks itself never speak for the rank."""

from __future__ import annotations

import json
import time
from pathlib import Path

from support.runs import SCRIPTS, Runs

from grpo_run.runtime.board.board import Board
from grpo_run.watchdog.observation import RankState

CHILDREN = 12


def test_children_of_a_rank_never_speak_for_it(runs: Runs, tmp_path: Path) -> None:
    """However they end: the rank is neither done nor failed, and its own failure is the one that is
    reported.
    """
    run = runs("--max-restarts", "0", "--nproc-per-node", "2", str(SCRIPTS / "forks.py")).start()
    children = tmp_path / "children"
    deadline = time.monotonic() + 120.0
    while not children.exists() or len(children.read_text().splitlines()) < CHILDREN:
        assert time.monotonic() < deadline, run.tail()
        assert run.process.poll() is None, run.tail()
        time.sleep(0.05)
    time.sleep(0.5)  # the last one is about to exit
    slot = Board.open(run.directory / "board.mmap").read(0)
    assert slot is not None
    assert slot.state is RankState.starting
    assert [event["rank"] for event in run.events("rank_completed")] == [1]
    assert list((run.directory / "attempts" / "000").glob("*.error.json")) == []
    # those that end as a script does run the exit handlers that they inherited, as in Python
    assert len((tmp_path / "handlers").read_text().splitlines()) >= 7
    (tmp_path / "go").touch()
    run.ended(93)
    (verdict,) = run.verdicts()
    assert verdict["culprits"] == [0]
    assert "the rank failed" in verdict["sentence"]
    assert "the child failed" not in json.dumps(verdict)
    log = (run.directory / "attempts" / "000" / "rank0.log").read_text()
    assert "ValueError: the child failed" in log  # what a child prints is printed
    assert "SIGSEGV" in log or "Segmentation fault" in log
    assert (run.directory / "attempts" / "000" / "rank0.stacks").read_text().count("Segmentation fault") == 0
