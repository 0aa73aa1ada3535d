"""Hosts that do not take part are named: one that was lost twice in a row, and one that was refused."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from support.hosts import HostRun, hosts, missing
from support.references import undisturbed
from support.runs import SCRIPTS, digest
from support.trainer_and_loop import TRAINER

pytestmark = [pytest.mark.skipif(bool(missing()), reason=missing()), pytest.mark.full]
START_SECONDS = 180.0
STEPS, HELD = 60, 6
CHECKPOINT_SECONDS = 4.0
"""Until one that is made is known, also to the host that waits."""
RANGE = (
    str(SCRIPTS / "sft.py"), "--output-dir", "ours", "--max-steps", str(STEPS), "--save-steps", "4",
    "--per-device-train-batch-size", "2", "--gradient-accumulation-steps", "2", "--texts", "240",
)  # fmt: skip
OUT = "host node1 stays out, because it was lost 2 times in a row"
FIXED = (str(SCRIPTS / TRAINER), "--output-dir", "ours", "--max-steps", "16", "--save-steps", "4")


@pytest.mark.timeout(600)
def test_a_host_lost_twice_in_a_row_stays_out_while_the_others_suffice(tmp_path: Path) -> None:
    """It is named on all terminals, in the journals and by `status`, is started in vain, and ends with 0."""
    with hosts(tmp_path, 2) as made:
        soon = ("--rdzv-conf", "last_call_timeout=3", "--deadline-floor", "300")
        one, two = [HostRun(host, tmp_path, *RANGE, nodes="1:2", options=soon) for host in made]
        with one.held(HELD) as let:
            two.start()
            one.start()
            for count in (1, 2):
                one.until_event("attempt_started", count=count, world_size=2, timeout_seconds=START_SECONDS)
                two.until_event("step_committed", attempt=count - 1, timeout_seconds=START_SECONDS)
                two.kill_supervisor()
                two.process.wait(30)
                one.until_event("incident", count=count, cause="node_lost")
                assert OUT not in one.printed()
                two.start()
                if count == 1:  # it takes part after a checkpoint that is made while it waits
                    two.until(lambda events: "until the others restart their ranks" in two.printed())
                    for steps in range(HELD + 4, STEPS - 2 * HELD, 4):
                        if len(two.events("attempt_started")) == 1:
                            let(steps)
                            time.sleep(CHECKPOINT_SECONDS)
                    let(HELD)
            for run in (one, two):
                run.until(lambda events, run=run: OUT in run.printed())
                assert any(OUT in event["text"] for event in run.events("warning"))
                assert OUT in run.command("status")
            let(STEPS)
        for run in (one, two):
            run.ended()
    assert len(two.events("attempt_started")) == 2
    assert one.status()["checkpoint"]["step"] == STEPS
    assert not one.events("checkpoint_failed")
    assert "has finished the run" in two.printed()


def test_a_refused_host_is_named_by_those_that_wait(tmp_path: Path) -> None:
    """Until it is started without the mistake; then nobody has lost anything."""
    with hosts(tmp_path, 2) as made:
        runs = [HostRun(host, tmp_path, *FIXED) for host in made]
        wrong = HostRun(made[1], tmp_path, *FIXED, options=("--stop-timeout", "soon"))
        runs[0].start()
        wrong.start().ended(2)
        assert "The other hosts wait" not in wrong.printed()
        said = "host node1 was refused: argument --stop-timeout"
        runs[0].until(lambda events: f" of 600; {said}" in runs[0].printed())
        assert said in runs[0].command("status")
        runs[1].start()
        for run in runs:
            run.ended()
            assert "no faults" in run.printed()
    assert digest(tmp_path / "ours") == undisturbed(TRAINER, 16)
