"""Hosts that report to one another reach one verdict, whichever of them judges."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from support.builders.watchdog.deadlock_shell import records
from support.builders.watchdog.failed_ranks import make_error, make_exit
from support.builders.watchdog.slots import make_slot

from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.deadlocks.positions import Position, without_other_threads
from grpo_run.watchdog.deadlocks.proof import prove
from grpo_run.watchdog.diagnosis.fault import Evidence, diagnose
from grpo_run.watchdog.diagnosis.host_reports import HostReport, join, report_of
from grpo_run.watchdog.json_values import unpack
from grpo_run.watchdog.observation import Exit
from grpo_run.watchdog.verdict import Verdict

LIMIT_BYTES = 256 * 1024


def evidence(rank: int, *exits: Exit, **fields: Any) -> Evidence:
    """What a host with one rank, in step 8, knows."""
    slots = {rank: make_slot(rank)}
    return Evidence(slots=slots, world_size=2, best_position=(1, 7), exits=exits, **fields)


def reported(node: int, own: Evidence, at: float, limit_bytes: int = LIMIT_BYTES) -> HostReport:
    """The report of host `node<node>`, as the others have it, with all exits seen at a time."""
    report = report_of(own, node=node, host=f"node{node}", seen_at={one.rank: at for one in own.exits})
    return unpack(HostReport, report.encoded(limit_bytes))


def verdicts(owns: Sequence[Evidence], at: Sequence[float], lost: Sequence[str] = ()) -> list[Verdict]:
    """What each host judges."""
    reports = [reported(node, own, at[node]) for node, own in enumerate(owns)]
    return [diagnose(join(own, random.sample(reports, len(reports)), lost)) for own in owns]


LOST = make_error(
    type="RuntimeError", message="Connection closed by peer [10.0.0.2]:1234", location=None, wall_time=1005.0
)


def test_a_signal_on_another_host_is_the_cause_on_all() -> None:
    """Although this one has seen only a lost connection, and its clock says that it was first."""
    one, other = verdicts(
        [evidence(0, make_exit(0, error=LOST)), evidence(1, make_exit(1, signal=9))], [1000, 1001]
    )
    assert one == other
    assert (one.cause, one.culprit, one.confidence) == (Cause.signal, 1, "proved")
    assert one.sentence == "Rank 1 on host node1 was killed by SIGKILL in step 8 (phase generate)."


def test_an_exception_has_its_line_and_phase_everywhere() -> None:
    """The slots of a host go with its report, because where a rank was decides what is said of it."""
    raised = make_error(message="bad \ud800 reward")
    one, other = verdicts(
        [evidence(0, make_exit(0, error=LOST)), evidence(1, make_exit(1, error=raised))], [1001, 1000]
    )
    assert one == other
    assert (one.cause, one.culprit) == (Cause.exception, 1)
    assert one.location is not None
    assert one.location.short == "train.py:12 in reward"
    assert one.sentence.startswith("Rank 1 on host node1 raised ZeroDivisionError in step 8")


def test_a_rank_that_has_not_exited_yet_may_be_the_cause() -> None:
    """It has left its error, and its peer on another host was seen to exit first."""
    one, other = verdicts(
        [evidence(0, make_exit(0, error=LOST)), evidence(1, errors={1: make_error()})], [1000, 1000]
    )
    assert one == other
    assert (one.cause, one.culprit) == (Cause.exception, 1)


def test_a_rank_that_has_completed_elsewhere_left_early() -> None:
    """Its peer lost the connection to it."""
    one, other = verdicts(
        [evidence(0, make_exit(0, error=LOST)), evidence(1, make_exit(1, exit_code=0, completed=True))],
        [1001, 1000],
    )
    assert one == other
    assert (one.cause, one.culprit) == (Cause.rank_exited_early, 1)


def test_a_lost_connection_is_explained_by_a_lost_supervisor_only_without_another_cause() -> None:
    """A host of which nothing is known is no cause as long as a rank has failed by itself."""
    gone = ["The supervisor of host node1 is gone, and its ranks with it."]
    (verdict,) = verdicts([evidence(0, make_exit(0, error=LOST))], [1000], gone)
    assert (verdict.cause, verdict.sentence, verdict.culprits) == (Cause.node_lost, gone[0], ())
    (verdict,) = verdicts([evidence(0, make_exit(0, error=make_error()))], [1000], gone)
    assert (verdict.cause, verdict.culprit) == (Cause.exception, 0)
    (verdict,) = verdicts([evidence(0, make_exit(0, error=LOST))], [1000])
    assert verdict.cause is Cause.unknown


def test_a_deadlock_that_one_host_has_proved_is_the_verdict_of_all() -> None:
    """Its ranks are killed for it, and those of the others lose their connection."""
    positions = {
        rank: without_other_threads(Position(rank=rank, records=records("past", word)))
        for rank, word in enumerate(("later", "gather"))
    }
    deadlock = prove(positions, world_size=2)
    assert deadlock is not None
    one, other = verdicts(
        [evidence(0, make_exit(0, error=LOST)), evidence(1, deadlock=deadlock)], [1000, 1000]
    )
    assert (one.cause, one.culprits, one.sentence) == (other.cause, other.culprits, other.sentence)
    assert one.cause is Cause.collective_mismatch
    assert one.sentence.startswith("Deadlock: rank 0 on host node0 is in all_reduce")


def test_a_report_that_is_too_long_still_has_its_exits() -> None:
    """Texts are cut, and whatever else there is no room for is left out."""
    noise = "".join(map(chr, random.Random(7).choices(range(32, 0xD000), k=200_000)))
    own = evidence(1, make_exit(1, error=make_error(message=noise, traceback=noise)))
    assert len(report_of(own, node=1, host="node1", seen_at={}).encoded(LIMIT_BYTES)) < LIMIT_BYTES
    short = reported(1, own, 1000, limit_bytes=1000)
    assert short.has_fault
    assert [exit.rank for _, exit in short.exits] == [1]
    assert len(short.encoded(1000)) < 1000
