"""A rank that nothing alive can wake is found within seconds, in the user's own code, and the run recovers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.references import undisturbed
from support.runs import SCRIPTS, Run, digest

TRAINING = "    tiny.train(trainer, arguments)\n"

LOCK_IN_A_CALLBACK = """    import threading
    from pathlib import Path

    from transformers import TrainerCallback

    class Uploader(TrainerCallback):
        lock = threading.Lock()

        def on_step_end(self, args, state, control, **kwargs):
            once = Path("once")
            if state.global_step == 6 and args.process_index == 1 and not once.exists():
                once.touch()
                with self.lock:
                    self.lock.acquire()

    trainer.add_callback(Uploader())
    tiny.train(trainer, arguments)
"""

SLEEP_AFTER_TRAINING = """    import time
    from pathlib import Path

    tiny.train(trainer, arguments)
    once = Path("once")
    if trainer.args.process_index == 1 and not once.exists():
        once.touch()
        time.sleep(100000)
    import torch
    torch.distributed.barrier()
"""


def start(runs: Callable[..., Run], folder: Path, body: str) -> tuple[Run, int]:
    """Run a script that ends with `body`; return the run and the line of its last call before the hang."""
    source = (SCRIPTS / "grpo.py").read_text()
    assert TRAINING in source
    source = source.replace(TRAINING, body)
    (folder / "stuck.py").write_text(source)
    (line,) = [
        number
        for number, text in enumerate(source.splitlines(), 1)
        if text.strip() in ("self.lock.acquire()", "time.sleep(100000)")
    ]
    run = runs(
        "--nproc-per-node", "2", "stuck.py", "--output-dir", "out", "--max-steps", "8", "--save-steps", "2",
        environment={"PYTHONPATH": str(SCRIPTS)},
    ).start()  # fmt: skip
    return run, line


def verdict_of(run: Run) -> tuple[dict[str, Any], float]:
    """Return the only verdict, and the seconds from the hang to its detection."""
    (event,) = run.events("incident")
    (found,) = [event for event in run.events("state_changed") if event["to"] == "collecting"]
    verdict: dict[str, Any] = json.loads((Path(event["incident"]) / "verdict.json").read_text())
    return verdict, found["time"] - event["failed_at"]


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("body", "what"),
    [
        (LOCK_IN_A_CALLBACK, "waits for a lock that no running thread can release"),
        (SLEEP_AFTER_TRAINING, "waits for the end of a sleep"),
    ],
    ids=["lock", "sleep"],
)
def test_a_stuck_rank_is_proved_within_15_seconds(
    runs: Callable[..., Run], tmp_path: Path, body: str, what: str
) -> None:
    """Rank, cause and line are right, although no deadline of this phase has passed or was learned."""
    run, line = start(runs, tmp_path, body)
    assert run.wait(150) == 0, run.tail()
    verdict, seconds = verdict_of(run)
    assert verdict["confidence"] == "proved", verdict["sentence"]
    assert (verdict["culprits"], verdict["waiters"]) == ([1], [0]), verdict["sentence"]
    assert verdict["cause"] == "no_progress"
    assert what in verdict["sentence"], verdict["sentence"]
    assert (Path(verdict["location"]["file"]).name, verdict["location"]["line"]) == ("stuck.py", line)
    assert seconds <= 15.0
    assert digest(tmp_path / "out") == undisturbed("grpo.py", 8)
