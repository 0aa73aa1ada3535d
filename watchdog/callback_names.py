"""Names of the user's callbacks, tools and rewards: keys of recorded durations, and names in messages.

Given by `trainers.hooks` to the board, used by every sentence. Pure.
"""

from __future__ import annotations

_TOOL = "tool "
_RESET = "reset of "


def tool_name(function: str) -> str:
    """Return the name of a tool of an agent."""
    return f"{_TOOL}{function}"


def reset_name(environment: str) -> str:
    """Return the name of `reset` of an environment's class."""
    return f"{_RESET}{environment}"


def place_name(name: str) -> str:
    """Return what a sentence calls the code: `callback Log.on_step_end`, `tool search`."""
    return name if name.startswith((_TOOL, _RESET)) else f"callback {name}"
