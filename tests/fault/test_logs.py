"""`grpo-run logs -f` beside a real run, over a kill and a new attempt."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import warm
from support.references import undisturbed
from support.runs import BIN, WITH_SCRIPTS, Runs, before_training, digest

from grpo_run.dashboards.rank_logs import harmless

STEPS = 16
SAID = r"""    import os
    print(f"\x1b[31mrank {os.environ['RANK']}\x1b[0m\0\x1b]0;a title\x07 of attempt begins", flush=True)
    print("x" * 40_000, flush=True)
"""


@pytest.mark.full
def test_five_readers_follow_a_run_over_a_kill(runs: Runs, tmp_path: Path) -> None:
    """Each gets every line of every rank and attempt in order, harmless, and ends with the run, which trains
    as if nobody had looked.
    """
    before_training(tmp_path / "train.py", SAID)
    run = runs(
        "--nproc-per-node", "2", "train.py", "--output-dir", "ours", "--max-steps", str(STEPS),
        "--save-steps", "4", "--step-seconds", "0.05", "--settings", '{"logging_steps": 1}',
        environment=WITH_SCRIPTS,
    )  # fmt: skip
    command = [str(BIN / "grpo-run"), "logs", "-f", str(run.directory)]
    followers, files = [], [tmp_path / f"follower{number}" for number in range(5)]
    try:
        with run.held(after=8):
            run.start().until_step(2)
            for path in files:
                with open(path, "wb") as file:
                    followers.append(
                        warm.start(command, cwd=tmp_path, environment=run.environment, stdout=file)
                    )
            run.until_step(8)
            run.kill(1)
            run.until_event("attempt_started", attempt=1)
        run.ended()
        assert [follower.wait(30.0) for follower in followers] == [0] * 5
    finally:
        for follower in followers:
            follower.kill()
    assert digest(tmp_path / "ours") == undisturbed("grpo.py", STEPS)
    shown = [path.read_text().split("\n") for path in files]
    for lines in shown:
        before, _, after = "\n".join(lines).partition("\n--- attempt 1 ---\n")
        for attempt, text in enumerate((before, after)):
            for rank in range(2):
                label = f"[rank{rank}] "
                got = [line.removeprefix(label) for line in text.split("\n") if line.startswith(label)]
                raw = (run.directory / f"attempts/{attempt:03d}/rank{rank}.log").read_bytes().decode()
                printed = [
                    line.rstrip("\r").rpartition("\r")[2] for line in raw.removesuffix("\n").split("\n")
                ]
                assert got == [harmless(line) for line in printed]
                assert f"rank {rank} of attempt begins" in got
    assert any("'loss'" in line for line in shown[0])
