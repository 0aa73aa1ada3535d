"""Unknown names in a query are found, and valid queries are accepted."""

from __future__ import annotations

import pytest

from grpo_run.dashboards.provisioning._promql import unknown_names

LABELS = {
    "grpo_step": frozenset({"run_id"}),
    "grpo_rank_phase": frozenset({"run_id", "rank", "phase"}),
    "grpo_votes_total": frozenset({"run_id", "rank"}),
}


@pytest.mark.parametrize(
    "expression",
    [
        "grpo_step",
        'grpo_step{run_id="$run_id"} / 2',
        "sum by (rank) (rate(grpo_votes_total[$__rate_interval]))",
        "sum(rate(grpo_votes_total[5m])) by (rank) > 0",
        "changes(grpo_step[5m]) == 0 and on (run_id) grpo_rank_phase == 1",
        "topk(1, grpo_step offset 1h) or grpo_step == bool 0 unless Inf",
        'max by (rank) (1 * grpo_rank_phase{phase="data"} or 2 * grpo_rank_phase{phase!~"a|b{2}"})',
        "grpo_step * on (run_id) group_left (rank) grpo_votes_total",
        "time() - grpo_step > 1e3",
        "grpo_step @ end()",
    ],
)
def test_known_names_are_accepted(expression: str) -> None:
    """Functions, keywords, strings, ranges and groupings are not mistaken for metrics."""
    assert unknown_names(expression, LABELS) == []


@pytest.mark.parametrize(
    ("expression", "unknown"),
    [
        ("grpo_stepp", ["grpo_stepp"]),
        ("sum(rate(grpo_vote_total[5m]))", ["grpo_vote_total"]),
        ('grpo_step{rank="0"}', ["grpo_step{rank}"]),
        ('grpo_rank_phase{run_id="a", fase=~"data"}', ["grpo_rank_phase{fase}"]),
        ("sum by (host) (grpo_votes_total)", ["host"]),
        ("grpo_step and on (ranks) grpo_votes_total", ["ranks"]),
        ('{run_id="a"}', ["{}"]),
        ("grpo_step + up", ["up"]),
        ('"grpo_step" + wrong', ["wrong"]),
        ("grpo_step{} + missing{}", ["missing"]),
    ],
)
def test_unknown_names_are_found(expression: str, unknown: list[str]) -> None:
    """Misspelled metrics, labels that the metric does not have, and unknown grouping labels are returned."""
    assert unknown_names(expression, LABELS) == unknown
