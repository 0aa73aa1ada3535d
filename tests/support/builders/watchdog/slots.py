"""A slot of a rank, as the board is read."""

from __future__ import annotations

import math
from typing import Any

from grpo_run.watchdog.observation import OpenPhase, Phase, RankState, Slot
from grpo_run.watchdog.rank_metrics import LOGGED_FIELDS


def make_slot(rank: int, **changes: Any) -> Slot:
    """A slot of a rank in its first `train()` call, at step 7 of 100, in `generate` inside `data`."""
    fields: dict[str, Any] = {
        "rank": rank, "local_rank": rank, "pid": 100 + rank, "attempt": 0, "state": RankState.training,
        "phases": (
            OpenPhase(phase=Phase.data, since_seconds=980.0),
            OpenPhase(phase=Phase.generate, since_seconds=990.0),
        ),
        "train_call": 1, "step": 7, "target_steps": 100, "voted_step": 7, "voted_at_ns": 979 * 10**9,
        "committed_step": 7, "resumed_step": 0,
        "last_progress_seconds": 995.0, "writes": 50, "tokens_generated": 4096, "rewards_scored": 64,
        "votes": 7, "vote_wait_seconds": 1.5, "cleanup_runs": 2, "cleanup_seconds": 0.25,
        "checkpoint_step": 5, "checkpoint_seconds": 0.5, "prompt_length": 64.0,
    }  # fmt: skip
    logged = {
        "reward": 0.5, "completion_length": 128.0, "loss": 0.125, "grad_norm": 2.0, "learning_rate": 1e-6,
        "reward_std": 0.25, "zero_variance_groups": 0.5, "truncated_completions": 0.125, "kl": 0.01,
        "entropy": 1.5,
        "clip_ratio": 0.0, "completion_length_max": 256.0, "terminated_completion_length": 96.0,
        "sampling_logp_difference": 0.01, "importance_sampling_ratio": 1.0,
    }  # fmt: skip
    logged |= {field: changes.pop(field) for field in LOGGED_FIELDS if field in changes}
    values = tuple(logged.get(field, math.nan) for field in LOGGED_FIELDS)
    return Slot(logged=values, **(fields | changes))
