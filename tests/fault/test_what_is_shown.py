"""What the user sees while a hang is under way, and first after a fault."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from faults import fault
from support.references import undisturbed
from support.runs import SCRIPTS, Runs, digest

from grpo_run.runtime.supervisor.stop import SAME_SECONDS

GRPO = (str(SCRIPTS / "grpo.py"), "--output-dir", "out", "--max-steps", "24", "--save-steps", "8")


def test_a_hang_is_shown_while_it_lasts_and_its_end_afterwards(runs: Runs) -> None:
    """The line and the status name the rank, the phase and the deadline; nothing is left of it at the end."""
    run = runs(
        *fault("hang", rank=1, step=12, seconds=55.0), "--deadline-floor", "60", "--nproc-per-node", "2",
        *GRPO, "--step-seconds", "0.05",
    ).start()  # fmt: skip
    deadline = time.monotonic() + 120.0
    while "waiting for rank 1: reward, " not in run.printed():
        assert time.monotonic() < deadline, run.tail()
        time.sleep(0.1)
    # the deadline is known once the supervisor has looked what the rank does
    while (status := run.status())["waiting"]["deadline_seconds"] is None:
        assert time.monotonic() < deadline, run.tail()
        time.sleep(0.5)
    assert (status["waiting"]["rank"], status["waiting"]["phase"]) == (1, "reward")
    assert status["waiting"]["waiters"] == [0]
    assert status["waiting"]["seconds"] < status["waiting"]["deadline_seconds"]
    assert status["sentence"].startswith("Waiting for rank 1: reward, ")
    assert [rank["phase"] for rank in status["ranks"]] == ["reward", "reward"]
    assert status["step_seconds"] > 0
    assert status["remaining_seconds"] is None
    # a stop cannot be agreed on; the second request ends the ranks
    for _ in range(2):
        run.command("stop")
        time.sleep(SAME_SECONDS + 0.5)  # sooner, it is the same request
    run.ended(75)
    status = run.status()
    assert (status["state"], status["waiting"], status["ranks"]) == ("stopped", None, [])
    assert status["snapshot_step"] is None


def test_in_a_file_the_tracebacks_of_all_ranks_are_shown_once_each_and_before_the_fault(runs: Runs) -> None:
    """As under torchrun. The sentence of the fault says whose is the cause."""
    run = runs(
        "--show-ranks", "all", "--max-restarts", "0", *fault("exception", rank=1, step=6, phase="reward"),
        "--nproc-per-node", "3", *GRPO,
    ).start()  # fmt: skip
    run.ended(93)
    shown = run.printed()
    assert shown.count("Traceback (most recent call last):") == 3
    assert shown.count("InjectedFault: injected into rank 1") == 1
    assert shown.rindex("Traceback") < shown.index("FAULT Rank 1 raised InjectedFault in step 6 ")
    logs = [(run.directory / f"attempts/000/rank{rank}.log").read_text() for rank in range(3)]
    assert all(log.count("Traceback (most recent call last):") == 1 for log in logs)


def test_a_terminal_that_takes_no_output_does_not_hold_up_a_recovery(runs: Runs, tmp_path: Path) -> None:
    """Stopped by Ctrl-S, or in copy mode: the run recovers and finishes. What was printed is there when it
    goes on.
    """
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    run = runs(
        "--nproc-per-node", "2", str(SCRIPTS / "grpo.py"), "--output-dir", "ours", "--max-steps", "16",
        "--save-steps", "4", "--step-seconds", "0.05", "--settings", '{"logging_steps": 1}',
    )  # fmt: skip
    with run.held(after=12):
        run.start(output=writer)
        os.close(writer)
        run.until_step(12)
        run.kill(1)
        run.until_event("attempt_started", attempt=1)
    run.until_event("run_ended")
    with os.fdopen(reader, "rb") as shown:
        printed = shown.read().decode()
    run.ended()
    assert digest(tmp_path / "ours") == undisturbed("grpo.py", 16)
    assert "FAULT Rank 1 was killed by SIGKILL" in printed
    assert "Finished at step 16 of 16, 1 fault recovered." in printed
