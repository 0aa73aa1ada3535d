"""Consensus functions called from a user's own loop."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from support.runs import Run


def test_loop_runs_on_all_ranks_until_the_last_one_is_done(runs: Callable[..., Run], tmp_path: Path) -> None:
    """Rank 0 needs 3 rounds and rank 1 needs 7: both run 7, and `any` and `all` return the same on both."""
    (tmp_path / "rounds.py").write_text(
        "import os, pathlib\n"
        "from grpo_run.trainers import consensus\n"
        "rank = int(os.environ['RANK'])\n"
        "need, rounds = (3, 7)[rank], 0\n"
        "for _ in consensus.loop(lambda: rounds < need):\n"
        "    rounds += 1\n"
        "answer = (rounds, consensus.any(rank == 1), consensus.any(False), consensus.all(rank == 1), consensus.all(True))\n"
        "pathlib.Path(f'rank{rank}.txt').write_text(repr(answer))\n"
    )
    run = runs("--nproc-per-node", "2", "rounds.py").start()
    assert run.wait() == 0, run.tail()
    for rank in (0, 1):
        assert (tmp_path / f"rank{rank}.txt").read_text() == repr((7, True, False, False, True))


def test_calls_from_different_lines_fail_with_both_places(runs: Callable[..., Run], tmp_path: Path) -> None:
    """Consensus calls from different lines raise an error that names both, and the cause is a mismatch."""
    (tmp_path / "apart.py").write_text(
        "import os\n"
        "from grpo_run.trainers import consensus\n"
        "if os.environ['RANK'] == '0':\n"
        "    consensus.any(True)\n"
        "else:\n"
        "    consensus.any(True)\n"
    )
    run = runs("--nproc-per-node", "2", "apart.py").start()
    assert run.wait() == 93, run.tail()
    assert "apart.py:4 in <module>" in run.tail()
    assert "apart.py:6 in <module>" in run.tail()
    assert run.status()["recoveries"][0]["cause"] == "collective_mismatch"
