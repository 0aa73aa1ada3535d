"""Nothing healthy is ended: real runs with long pauses, odd communication and odd conditions, under the
defaults.

Each run must end with 0, without an incident or a warning, and mostly with the weights of an undisturbed run.
A short run is in `make test`; the rest is a campaign of 200 runs, whose results are appended to
`build/oddities.jsonl`. Run it with two workers at most.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.oddities import check, unsupported
from support.oddity_scenarios import LONG, QUICK, Scenario, generated, others, pauses
from support.result_rows import append
from support.runs import Runs

RESULTS = Path(__file__).parents[2] / "build" / "oddities.jsonl"
RUNS = 200
NAMED = [*pauses(), *others(), *LONG]
CAMPAIGN = [*NAMED, *(generated(number) for number in range(RUNS - len(NAMED)))]


def prove(scenario: Scenario, runs: Runs, tmp_path: Path) -> None:
    """Run a scenario, keep its result, and fail if anything is wrong with it."""
    if reason := unsupported(scenario):
        pytest.skip(reason)
    result = check(scenario, runs, tmp_path)
    append(result, RESULTS)
    assert result.wrong == (), result


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "scenario", [QUICK[0], *(pytest.param(one, marks=pytest.mark.full) for one in QUICK[1:])], ids=str
)
def test_healthy_run_is_left_alone(scenario: Scenario, runs: Runs, tmp_path: Path) -> None:
    """Waits that end from outside, and communication in which threads and non-members take part."""
    prove(scenario, runs, tmp_path)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("scenario", CAMPAIGN, ids=str)
def test_the_campaign_of_oddities(scenario: Scenario, runs: Runs, tmp_path: Path) -> None:
    """Pauses of 5, 12, 30 and 50 s at every place, groups, conditions, and combinations drawn at random."""
    prove(scenario, runs, tmp_path)
