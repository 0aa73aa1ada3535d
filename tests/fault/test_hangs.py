"""Hangs without proof end at the learned deadline, with rank, line and cause; weights are unchanged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from faults import fault, fired
from support.references import undisturbed
from support.runs import SCRIPTS, WITH_SCRIPTS, Run, Runs, alive, before_training, digest
from support.trainer_and_loop import TRAINER


def verdicts(run: Run) -> list[dict[str, Any]]:
    """Return the verdict of each incident in order, with its folder and journal event."""
    found = []
    for event in run.events("incident"):
        folder = Path(event["incident"])
        found.append({**json.loads((folder / "verdict.json").read_text()), "folder": folder, "event": event})
    return found


HANGS: list[tuple[str, int, int, str | None, str, str]] = [
    ("hang", 1, 22, None, "reward_stall", "_sleep"),
    ("gil", 1, 26, "score", "interpreter_stuck", "_hold_interpreter"),
    ("hang", 0, 30, "checkpoint", "checkpoint_stall", "_sleep"),
    ("stop", 0, 34, "generate", "interpreter_stuck", "_stop"),
    ("lock", 0, 38, "optimizer", "no_progress", "_wait_for_lock"),
    ("hang", 1, 42, "data", "data_stall", "_sleep"),
]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("count", [3, pytest.param(len(HANGS), marks=pytest.mark.full)])
def test_hangs_end_at_the_deadline_and_leave_weights_unchanged(
    count: int, runs: Runs, tmp_path: Path
) -> None:
    """Several hangs in one run: each is reported with rank, cause and line; the weights equal torchrun's.

    After the script's last line, a hanging exit handler costs one warning and one incident, and no attempt.
    """
    injected = HANGS[:count]
    last = injected[-1][2] + 2
    steps = ("--max-steps", str(last), "--save-steps", "2")
    words = [
        w for kind, rank, step, phase, *_ in injected for w in fault(kind, rank=rank, step=step, phase=phase)
    ]
    words += fault("exit-hang", rank=1, step=last)
    run = runs(
        *words, "--deadline-floor", "4", "--deadline-exit", "5", "--nproc-per-node", "2",
        str(SCRIPTS / TRAINER), "--output-dir", "ours", *steps, "--step-seconds", "0.03",
        "--save-total-limit", "3",
    ).start().ended(timeout_seconds=300)  # fmt: skip
    assert digest(tmp_path / "ours") == undisturbed(TRAINER, last)
    assert sum(fired(run).values()) == len(injected) + 1
    *found, at_exit = verdicts(run)
    assert at_exit["culprits"] == [1]
    assert at_exit["location"]["function"] == "_sleep"
    assert "did not exit" in at_exit["sentence"]
    assert run.status()["attempts"] == len(injected) + 1
    for (kind, rank, _, _, cause, function), verdict in zip(injected, found, strict=True):
        assert verdict["cause"] == cause, (kind, verdict["sentence"])
        assert verdict["culprits"] == [rank], (kind, verdict["sentence"])
        # a lock and a long sleep may be proved before the deadline passes
        assert verdict["confidence"] in ("deadline", "proved")
        assert verdict["location"]["file"].endswith("runtime/features/injections/_faults.py"), (
            kind,
            verdict["location"],
        )
        assert verdict["location"]["function"] == function, (kind, verdict["location"])
        assert (verdict["folder"] / "stacks" / "folded.txt").read_text().strip()


POLLING_CALLBACK = """
    import time
    from pathlib import Path

    from transformers import TrainerCallback

    class Publisher(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            once = Path("once")
            if state.global_step == 6 and args.process_index == 1 and not once.exists():
                once.touch()
                while True:
                    time.sleep(0.5)

    trainer.add_callback(Publisher())
"""


def test_a_callback_that_waits_for_nothing_is_ended_and_named(runs: Runs, tmp_path: Path) -> None:
    """It polls without an end, so nothing proves that it hangs; it does nothing while the other rank waits.

    The next attempt remembers how long it waited.
    """
    before_training(tmp_path / "polling.py", POLLING_CALLBACK)
    run = runs(
        "--deadline-floor", "6", "--nproc-per-node", "2", "polling.py", "--output-dir", "out",
        "--max-steps", "8", "--save-steps", "2", environment=WITH_SCRIPTS,
    ).start().ended()  # fmt: skip
    (verdict,) = verdicts(run)
    assert (verdict["culprits"], verdict["waiters"], verdict["phase"]) == ([1], [0], "callback")
    assert verdict["sentence"].startswith("Rank 1 has been in callback Publisher.on_step_end for ")
    assert verdict["location"]["function"] == "on_step_end"
    ended = [
        event["durations"].get("ended_seconds")
        for event in run.events("phase_learned")
        if event.get("callback") == "Publisher.on_step_end"
    ]
    assert ended[-1] >= 6.0


IGNORES_SIGTERM = """
import faulthandler, os, signal, subprocess
faulthandler.register(signal.SIGTERM, open(f"received{os.environ['RANK']}-{os.getpid()}", "w"), all_threads=False)
child = subprocess.Popen(["sleep", "300"], process_group=0)
open(f"child{os.environ['RANK']}-{os.getpid()}", "w").write(str(child.pid))
"""  # noqa: E501
"""Records SIGTERM from C, also while a collective blocks Python, and does not exit; has a child in another
process group."""


@pytest.mark.parametrize("kind", ["hang", pytest.param("skip", marks=pytest.mark.full)])
def test_evidence_precedes_the_first_signal_and_ranks_that_ignore_it_are_killed(
    kind: str, runs: Runs, tmp_path: Path
) -> None:
    """Verdict and stacks are older than the first SIGTERM.

    Ranks that ignore it are killed with their children.
    """
    source = (SCRIPTS / "grpo.py").read_text()
    assert "from __future__ import annotations\n" in source
    (tmp_path / "ignores_sigterm.py").write_text(
        source.replace(
            "from __future__ import annotations\n",
            "from __future__ import annotations\n" + IGNORES_SIGTERM,
            1,
        )
    )
    run = runs(
        *fault(kind, rank=1, step=4), "--deadline-floor", "2", "--deadline-exit", "2",
        "--nproc-per-node", "2", "ignores_sigterm.py", "--output-dir", "ours", "--max-steps", "6",
        "--save-steps", "2", environment=WITH_SCRIPTS,
    ).start()  # fmt: skip
    run.until_event("attempt_started", attempt=1)
    (verdict,) = verdicts(run)
    received = [path.stat().st_mtime for path in tmp_path.glob("received*") if path.stat().st_size]
    assert len(received) == 2, "a rank got no SIGTERM"
    files = [path for path in verdict["folder"].rglob("*") if path.is_file()]
    assert {"verdict.json", "folded.txt", "timeline.json", "events.jsonl"} <= {path.name for path in files}
    assert max(path.stat().st_mtime for path in files) <= min(received)  # a file's clock ticks every 4 ms
    first = [e["pid"] for e in run.events("rank_started") if e["attempt"] == 0]
    assert alive(first) == []
    assert alive([int((tmp_path / f"child{rank}-{pid}").read_text()) for rank, pid in enumerate(first)]) == []
    run.ended()
