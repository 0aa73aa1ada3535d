"""The list of metrics is complete: each has its values and its chart or a reason, or is named as empty."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from grpo_run.dashboards.curves import charts_of
from grpo_run.dashboards.live.values import MOST_LINES, all_values, sampled
from grpo_run.dashboards.metrics.catalogue import ALL_METRICS
from grpo_run.runtime.history.status import RunStatus

MakeStatus = Callable[..., RunStatus]


def listed(status: RunStatus) -> tuple[dict[str, dict[str, Any]], set[str]]:
    """The rows by name, and the names without values."""
    found = all_values(status, charts_of(status.history))
    return {row["name"]: row for row in found["rows"]}, {row["name"] for row in found["empty"]}


def test_every_metric_is_listed_once(make_status: MakeStatus, make_slot: Callable[..., Any]) -> None:
    """With a chart or the reason why it has none; without ranks too."""
    for slots in ((make_slot(0), make_slot(1)), ()):
        rows, empty = listed(make_status(*slots))
        assert rows.keys() | empty == {metric.name for metric in ALL_METRICS}
        assert not rows.keys() & empty
        assert all(bool(row["chart"]) != bool(row["why"]) for row in rows.values())
        assert all(row["values"] for row in rows.values())


def test_of_states_only_the_present_one_is_told(
    make_status: MakeStatus, make_slot: Callable[..., Any]
) -> None:
    """The others are 0, and there are many."""
    rows, _ = listed(make_status(make_slot(0)))
    assert rows["grpo_run_state"]["values"] == [["running", 1.0]]
    assert [labels for labels, _ in rows["grpo_step_duration_seconds"]["values"]] == ["calls", "seconds"]


@pytest.mark.parametrize("ranks", [2, MOST_LINES, MOST_LINES + 1])
def test_many_ranks_are_drawn_as_three_lines(
    make_status: MakeStatus, make_slot: Callable[..., Any], ranks: int
) -> None:
    """Of 64 lines in a small chart none could be told from another."""
    status = make_status(*(make_slot(rank) for rank in range(ranks)))
    keys = [key for key, _ in sampled(status, charts_of(status.history)) if key.startswith("rank_memory")]
    names = ("lowest", "mean", "highest") if ranks > MOST_LINES else (f"rank {rank}" for rank in range(ranks))
    assert sorted(keys) == sorted(f"rank_memory/{name}" for name in names)
