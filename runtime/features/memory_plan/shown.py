"""Words of the memory plan in metrics and on the terminal. Plain data."""

from __future__ import annotations

ACTION = "restart_with_plan_change"

ACTIONS = {ACTION: "restart all ranks with another memory plan"}
"""What the supervisor may decide on, and how the terminal says it."""
