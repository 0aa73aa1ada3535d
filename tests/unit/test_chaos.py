"""The fault campaign draws the same cases from a seed, knows what must follow, and goes on where it ended."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from support.chaos import Ended, judge, missing
from support.chaos_faults import FAULTS, KINDS, STEPS, Run, draw
from support.chaos_table import markdown, page

from grpo_run.runtime.features.injections._injection import KINDS as INJECTED
from grpo_run.runtime.features.injections._injection import check, parse_all

WEIGHTS = {"rank0, call 1": "a", "rank1, call 1": "b"}


def test_a_seed_draws_the_same_cases_whatever_else_is_drawn() -> None:
    there = {number: draw(7, number) for number in (31, 4)}
    assert {number: draw(7, number) for number in (4, 31)} == there
    assert draw(8, 4) != there[4]


def test_a_thousand_faults_are_possible_and_of_every_kind() -> None:
    """Each text is accepted by `--inject`, no two share a step, and two steps and a save lie between them."""
    runs = missing(1, 1000, [])
    assert {case.kind for run in runs for case in run.cases} == set(KINDS)
    assert len(KINDS) >= 25
    assert set(INJECTED) <= {kind.inject for kind in KINDS.values()}
    for run in runs:
        parsed = parse_all(case.injection for case in run.cases)
        check(parsed, 2)
        assert [str(one) for one in parsed] == [case.injection for case in run.cases]
        steps = [case.step for case in run.cases]
        assert all(later - earlier >= 2 for earlier, later in pairwise(steps)), steps
        assert steps[-1] <= STEPS - 5
        assert sum(bool(KINDS[case.kind].code) for case in run.cases) == 1


def journal_of(run: Run) -> list[dict[str, Any]]:
    """Return the journal of a run in which everything was as specified."""
    found: list[dict[str, Any]] = [{"event": "attempt_started"}]
    for case in run.cases:
        found.append({"event": "fault_injected", "injection": case.injection, "time": 1.0})
        if causes := sorted(KINDS[case.kind].right_causes(case.phase)):
            found.append(
                {"event": "incident", "cause": causes[0], "culprits": [case.rank], "sentence": "A sentence."}
            )
            found.append({"event": "attempt_started"})
        found += [{"event": KINDS[case.kind].event}, {"event": "step_committed", "committed_at": 3.5}]
    return found


def ended(run: Run, **changes: Any) -> Ended:
    """Return a run in which everything was as specified, but for the changes."""
    codes = (*(KINDS[case.kind].code for case in run.cases if KINDS[case.kind].code), 0)
    return replace(Ended(codes=codes, journal=journal_of(run), weights=WEIGHTS, left=()), **changes)


@pytest.mark.parametrize("number", range(3))
def test_a_run_as_specified_is_right(number: int) -> None:
    run = draw(1, number)
    results = judge(run, ended(run), WEIGHTS)
    assert [one["wrong"] for one in results] == [[]] * FAULTS
    assert all(one["cause_right"] and one["rank_right"] and one["weights"] == "equal" for one in results)
    shown = [{**one, "at": "2026-11-29T00:00:00"} for one in results]
    assert f"| all |  | {FAULTS} | {FAULTS} | 100.0% | 100.0% | {FAULTS} of {FAULTS} |" in markdown(shown)
    assert "Not as specified: 0" in page(shown)


def test_what_is_not_as_specified_is_said() -> None:
    run = next(one for one in missing(1, 1000, []) if one.cases[0].kind == "rank-kill")
    journal = journal_of(run)

    def first(**changes: Any) -> list[str]:
        found: list[str] = judge(run, ended(run, **changes), WEIGHTS)[0]["wrong"]
        return found

    def with_incident(**fields: Any) -> list[dict[str, Any]]:
        return [{**event, **fields} if event["event"] == "incident" else event for event in journal]

    assert first(journal=with_incident(cause="gpu_oom")) == ["cause gpu_oom, not signal"]
    assert first(journal=with_incident(culprits=[1 - run.cases[0].rank]))[0].startswith("ranks [")
    assert first(journal=[event for event in journal if event["event"] != "incident"]) == ["not seen"]
    assert first(weights={}) == ["weights differ"]
    assert first(weights={}, journal=[*journal, {"event": "memory_plan_applied"}]) == []
    assert first(left=("process x",)) == ["process x"]
    assert first(journal=journal[:1], codes=(93,)) == ["it never happened", "the run ended with 93"]
    later = judge(run, ended(run, journal=journal[:4], codes=(93,)), WEIGHTS)
    assert [one["done"] for one in later] == [True, *[False] * (FAULTS - 1)]
