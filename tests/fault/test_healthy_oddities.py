"""Nothing healthy is ended: real runs with long pauses, odd communication and odd conditions, under the
defaults.

Each run must end with 0, without an incident or a warning, and mostly with the weights of an undisturbed run.
A short run is in `make test`; the rest is a campaign, which prints a row for each run. Run it with two
workers at most.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.oddities import check, unsupported
from support.oddity_scenarios import LONG, QUICK, Scenario, others, pauses
from support.runs import Runs

CAMPAIGN = [*QUICK[1:], *pauses(), *others(), *LONG]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "scenario", [QUICK[0], *(pytest.param(one, marks=pytest.mark.full) for one in CAMPAIGN)], ids=str
)
def test_healthy_run_is_left_alone(scenario: Scenario, runs: Runs, tmp_path: Path) -> None:
    """Waits that end from outside, pauses of 5, 12, 30 and 50 s at every place, communication in which
    threads and non-members take part, and odd conditions.
    """
    if reason := unsupported(scenario):
        pytest.skip(reason)
    result = check(scenario, runs, tmp_path)
    print(result)
    assert result.wrong == (), result
