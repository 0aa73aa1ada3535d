"""Words of quarantine in metrics and on the terminal. Plain data."""

from __future__ import annotations

ACTION = "quarantine_batch"
REASON = "quarantined"

ACTIONS = {ACTION: "restart all ranks and replace the prompts of the rollout"}
"""What the supervisor may decide on, and how the terminal says it."""
MASKING_REASONS = {REASON: "The prompt is in quarantine; the completion is of another one."}
"""Why samples are excluded from the loss; the keys are metric labels."""
