"""A fault is on disk before it happens, at its rank and step, and happens once."""

from __future__ import annotations

import pytest
from support.builders.trainers.injections import InjectedRank, Log

from grpo_run.runtime.errors import ConfigError
from grpo_run.runtime.features.injections._faults import KINDS, InjectedFault
from grpo_run.runtime.features.injections.events import FaultInjected
from grpo_run.watchdog.observation import Phase


def test_each_kind_has_its_own_function() -> None:
    """A stack then names the kind."""
    assert len({kind.effect.__name__ for kind in KINDS.values()}) == len(KINDS)


@pytest.mark.usefixtures("logged_faults")
@pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if not KINDS[kind].collective and not KINDS[kind].takes_rows]
)
def test_a_fault_is_on_disk_before_it_happens(log: Log, kind: str) -> None:
    """A killed rank cannot journal it, and a fault without a record would happen again."""
    InjectedRank(log, f"{kind}@rank1:step3").steps(1, 5)
    assert log.lines == ["journaled", "on disk", f"{kind}@rank1:step3 on 1"]
    assert log.records == [
        FaultInjected(
            rank=1, step=3, kind=kind, injection=f"{kind}@rank1:step3", phase=KINDS[kind].phase.name
        )
    ]


@pytest.mark.usefixtures("logged_faults")
def test_a_fault_happens_once_although_its_phase_repeats(log: Log) -> None:
    """A phase may be entered several times per step, and a second call counts its steps from 1 again."""
    rank = InjectedRank(log, "slow@rank1:step3")
    rank.steps(1, 4)
    with rank.call():
        rank.steps(1, 4)
    assert len(log.records) == 1


@pytest.mark.usefixtures("logged_faults")
@pytest.mark.parametrize(
    ("rank", "fired", "first"),
    [(0, set(), 1), (2, set(), 1), (1, {"kill@rank1:step3"}, 1), (1, set(), 5)],
    ids=["another rank", "another rank", "an earlier attempt", "a passed step"],
)
def test_a_fault_happens_on_its_rank_at_its_step_and_in_one_attempt(
    log: Log, rank: int, fired: set[str], first: int
) -> None:
    """The next attempt repeats the step without it; one that resumes from step 5 has no fault for step 3."""
    InjectedRank(log, "kill@rank1:step3", rank=rank, fired=fired).steps(first, 8)
    assert log.lines == []


@pytest.mark.usefixtures("logged_faults")
@pytest.mark.parametrize("phase", ["checkpoint", "eval", "idle"])
def test_phases_after_a_step_belong_to_it(log: Log, phase: str) -> None:
    """checkpoint-4 is written while step 5 is the next step."""
    rank = InjectedRank(log, f"hang@rank1:step4:phase={phase}")
    rank.enter(Phase[phase], 4)
    assert log.lines == []
    rank.enter(Phase[phase], 5)
    assert len(log.records) == 1


@pytest.mark.usefixtures("logged_faults")
def test_faults_that_take_effect_later_are_armed_first(log: Log) -> None:
    """A rank that hangs registers no exit handler any more."""
    rank = InjectedRank(log, "hang@rank1:step2:phase=data", "exit-hang@rank1:step2")
    rank.steps(1, 2)
    assert [record.kind for record in log.records] == ["exit-hang", "hang"]


def test_an_injection_into_a_missing_rank_is_an_error(log: Log) -> None:
    """The rank checks again, because only here the world size is certain."""
    with pytest.raises(ConfigError, match="there is no rank 1"):
        InjectedRank(log, "kill@rank1:step3", rank=0, world_size=1)


@pytest.mark.parametrize("kind", ["mismatch-operation", "mismatch-shape", "skip"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_collective_without_a_process_group_is_an_error(log: Log, kind: str, rank: int) -> None:
    """On the rank that the injection names, and on the ranks that would take part."""
    injected = InjectedRank(log, f"{kind}@rank1:step1", rank=rank)
    with pytest.raises(ConfigError, match=r"torch\.distributed is not initialized"):
        injected.steps(1, 1)


def test_the_exception_names_its_injection(log: Log) -> None:
    """It is raised where the user's own exception would be."""
    with pytest.raises(InjectedFault, match=r"exception@rank1:step2") as caught:
        InjectedRank(log, "exception@rank1:step2").steps(1, 3)
    assert caught.traceback[-1].name == "_raise"
