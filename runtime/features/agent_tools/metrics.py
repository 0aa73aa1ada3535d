"""The metrics of tools and environments."""

from __future__ import annotations

from collections.abc import Callable

from grpo_run.runtime.features.agent_tools.events import OTHER, ToolHistory, Totals
from grpo_run.runtime.metrics import Metric, RunObservation, Values, counter


def _by_name(value: Callable[[Totals], float]) -> Callable[[RunObservation], Values]:
    def read(run: RunObservation) -> Values:
        found = {(OTHER, OTHER): Totals(), **run.history.part(ToolHistory).totals}
        return {key: value(total) for key, total in found.items()}

    return read


METRICS: tuple[Metric[RunObservation], ...] = (
    counter("grpo_tool_calls_total", "count", _by_name(lambda total: total.calls),
            "Calls of tools, and boots and resets of environments, by name and kind.", "tool", "kind"),
    counter("grpo_tool_failures_total", "count", _by_name(lambda total: total.failures),
            "Those that have raised an exception or were ended.", "tool", "kind"),
    counter("grpo_tool_seconds_total", "seconds", _by_name(lambda total: total.seconds),
            "The time that they took.", "tool", "kind"),
)  # fmt: skip
