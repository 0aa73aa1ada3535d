"""With a snapshot every step, a killed rank costs at most one step."""

from __future__ import annotations

from collections import Counter
from itertools import cycle
from pathlib import Path

import pytest
from faults import fault, fired
from support.references import undisturbed
from support.runs import SCRIPTS, Runs, digest
from support.trainer_and_loop import TRAINER

from grpo_run.watchdog.observation import Phase

PHASES = (
    Phase.checkpoint, Phase.forward_backward, Phase.generate, Phase.vote, Phase.optimizer, Phase.reward,
    Phase.data,
    Phase.score,
)  # fmt: skip


@pytest.mark.parametrize("kills", [4, pytest.param(50, marks=[pytest.mark.full, pytest.mark.timeout(1800)])])
def test_no_recovery_loses_more_than_a_step(kills: int, runs: Runs, tmp_path: Path) -> None:
    """Kills in every phase, on alternating ranks, lose at most one step each and leave the weights
    unchanged.
    """
    steps = 2 * kills + 4
    arguments = ("--max-steps", str(steps), "--save-steps", "5")
    # two steps apart, so that each attempt has a snapshot of its own
    planned = [
        (kill % 2, 2 * kill + 2, phase) for kill, phase in zip(range(kills), cycle(PHASES), strict=False)
    ]
    faults = [
        word for rank, step, phase in planned for word in fault("kill", rank=rank, step=step, phase=phase)
    ]
    run = runs(
        *faults, "--nproc-per-node", "2", "--snapshot-every", "1", str(SCRIPTS / TRAINER),
        "--output-dir", "ours", *arguments,
    ).start().ended(timeout_seconds=120 + 20 * kills)  # fmt: skip
    assert digest(tmp_path / "ours") == undisturbed(TRAINER, steps)
    assert sum(fired(run).values()) == kills
    recoveries = run.status()["recoveries"]
    assert len(recoveries) == kills
    lost = [recovery["lost_steps"] for recovery in recoveries]
    assert all(count is not None and count <= 1 for count in lost), lost
    # the journal agrees with `status`: each attempt starts at most one step below the highest committed
    committed = 0
    for event in run.events():
        if event["event"] == "step_committed":
            committed = max(committed, event["step"])
        elif event["event"] == "train_started" and event["rank"] == 0:
            assert event["step"] >= committed - 1, (event, committed)
    found = Counter(lost)
    seconds = sorted(recovery["recovery_seconds"] for recovery in recoveries)
    print(
        f"\n| {kills} SIGKILLs on alternating ranks, in {min(kills, len(PHASES))} phases, a snapshot every"
        f" step | {kills} | weights equal; lost steps: {found[0]} times 0, {found[1]} times 1; recovery"
        f" {seconds[kills // 2]:.1f} s median, {seconds[-1]:.1f} s maximum |"
    )
