"""A run over a range of hosts goes on with fewer where the batch can be kept, and waits where it cannot."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.hosts import HostRun, hosts, missing
from support.references import plain_ranks
from support.runs import SCRIPTS
from support.weights import relative_difference

pytestmark = [pytest.mark.skipif(bool(missing()), reason=missing()), pytest.mark.full]
STEPS, HELD = 60, 10
START_SECONDS = 180.0
SOON = ("--rdzv-conf", "last_call_timeout=3")


def _script(accumulation: int) -> tuple[str, ...]:
    steps = ("--max-steps", str(STEPS), "--save-steps", "4", "--logging-steps", "100")
    sizes = ("--per-device-train-batch-size", "2", "--gradient-accumulation-steps", str(accumulation))
    return (
        str(SCRIPTS / "sft.py"),
        *steps,
        *sizes,
        "--learning-rate",
        "1e-4",
        "--texts",
        "240",
        "--step-seconds",
        "0.2",
    )


def _runs(made: list, folder: Path, accumulation: int) -> list[HostRun]:
    command = (*_script(accumulation), "--output-dir", "ours")
    return [HostRun(host, folder, *command, nodes="2:3", options=SOON) for host in made]


def _begin(runs: list[HostRun]) -> None:
    for run in runs:
        run.start()
    for run in runs:
        run.until_step(HELD - 1, timeout_seconds=START_SECONDS)


def test_two_of_three_hosts_take_the_same_steps_until_the_third_is_back(tmp_path: Path) -> None:
    """The update is that of three hosts; the host that is back takes part after the next checkpoint."""
    with hosts(tmp_path, 3) as made:
        runs = _runs(made, tmp_path, 2)
        _begin(runs)
        made[2].kill()
        started = runs[0].until_event("attempt_started", count=1, attempt=1, timeout_seconds=START_SECONDS)
        assert started["world_size"] == 2
        runs[0].until_event("train_started", attempt=1, timeout_seconds=START_SECONDS)
        made[2].boot()
        runs[2].start()
        assert runs[0].until_event("attempt_started", attempt=2, timeout_seconds=120)["world_size"] == 3
        saved = [event["step"] for event in runs[0].events("checkpoint_published") if event["attempt"] == 1]
        assert saved
        for run in runs:
            run.ended()
    assert "2 of 3 ranks: gradient_accumulation_steps is 3 instead of 2" in runs[0].printed()
    assert "host node2 joins; restarting all ranks" in runs[0].printed()
    plain_ranks(tmp_path, [*_script(2), "--output-dir", "theirs"], ranks=3)
    difference = relative_difference(tmp_path / "ours", tmp_path / "theirs")
    (tmp_path / "difference").write_text(f"{difference:.1e}")
    assert difference < 1e-6


def test_a_batch_that_two_hosts_cannot_take_waits_for_the_third(tmp_path: Path) -> None:
    """Why is one line, and nobody ends."""
    with hosts(tmp_path, 3) as made:
        runs = _runs(made, tmp_path, 1)
        _begin(runs)
        made[2].kill()
        said = "cannot continue with 2 of 3 ranks: gradient_accumulation_steps 1 x 3 ranks cannot be divided"
        for run in runs[:2]:
            run.until(
                lambda events, run=run: "waiting for 1 of 3 hosts" in run.printed().partition(said)[2],
                START_SECONDS,
            )
        made[2].boot()
        runs[2].start()
        for run in runs:
            run.ended()
    plain_ranks(tmp_path, [*_script(1), "--output-dir", "theirs"], ranks=3)
    assert relative_difference(tmp_path / "ours", tmp_path / "theirs") == 0
