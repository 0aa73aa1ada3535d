"""The closed set of causes."""

from __future__ import annotations

import json

import pytest

from grpo_run.watchdog.causes import Cause

WORDS = [
    "exception", "signal", "startup_failure", "collective_mismatch", "collective_missing_rank",
    "rank_exited_early", "generation_stall", "reward_stall", "data_stall", "checkpoint_stall",
    "interpreter_stuck", "gpu_oom", "host_oom", "shm_full", "disk_full", "checkpoint_corrupt",
    "rollout_server_dead", "rollout_server_stuck", "weight_sync_stuck", "rollout_stale", "nonfinite",
    "learning_collapse", "replicas_differ", "no_progress", "stopped", "node_lost", "unknown",
]  # fmt: skip


def test_the_set_is_closed() -> None:
    """A new cause would be a metric label that no dashboard and no alert knows."""
    assert [cause.value for cause in Cause] == WORDS


@pytest.mark.parametrize("cause", list(Cause))
def test_a_cause_is_written_as_its_value(cause: Cause) -> None:
    """This holds for text, JSON and names."""
    assert f"{cause}" == str(cause) == json.loads(json.dumps(cause)) == cause.name
