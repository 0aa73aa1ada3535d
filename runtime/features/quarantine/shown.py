"""Words of quarantine in metrics and on the terminal. Plain data."""

from __future__ import annotations

ACTION = "quarantine_batch"
REASON = "quarantined"

ACTIONS = {ACTION: "restart all ranks and replace the prompts of the rollout"}
"""What the supervisor may decide on, and how the terminal says it."""
