"""A run over hosts goes on after it has lost a supervisor or a rank, in equal weights.

Lost hosts and cut cables are in `test_snapshots.py` and `test_membership.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.hosts import Host, HostRun, hosts, missing, start_all
from support.references import undisturbed
from support.runs import SCRIPTS, digest
from support.trainer_and_loop import TRAINER

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())
STEPS, HELD = 16, 10


def _runs(made: list[Host], folder: Path, *options: str) -> list[HostRun]:
    script = (str(SCRIPTS / TRAINER), "--output-dir", "ours", "--max-steps", str(STEPS), "--save-steps", "4")
    return [HostRun(host, folder, *script, options=options) for host in made]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[list[HostRun]]:
    """Two hosts with a rank each."""
    with hosts(tmp_path, 2) as made:
        yield _runs(made, tmp_path)


def _trained(runs: list[HostRun], folder: Path) -> None:
    for run in runs:
        run.ended()
    assert digest(folder / "ours") == undisturbed(TRAINER, STEPS)


def test_a_killed_supervisor_that_is_started_again_takes_part(pair: list[HostRun], tmp_path: Path) -> None:
    """The other host waits for it, tells it where to meet, and both go on from the newest checkpoint."""
    with pair[0].held(HELD):
        start_all(pair)
        pair[1].kill_supervisor()
        pair[1].process.wait(30)
        pair[1].start()
    _trained(pair, tmp_path)
    assert "this host lost 1 time" in pair[1].printed()


@pytest.mark.full
def test_a_spare_is_not_needed_for_a_killed_rank(tmp_path: Path) -> None:
    """All three hosts meet again, two of them have ranks, and the one that is left over disturbs nobody."""
    with hosts(tmp_path, 3) as made:
        runs = _runs(made, tmp_path)
        with runs[0].held(HELD):
            start_all(runs[:2])
            runs[2].start_as_spare()
            runs[1].kill(1)
            runs[1].until_event("incident")
        for run in runs:
            run.ended()
    assert digest(tmp_path / "ours") == undisturbed(TRAINER, STEPS)
    assert max(len(run.events("attempt_started")) for run in runs) == 2
