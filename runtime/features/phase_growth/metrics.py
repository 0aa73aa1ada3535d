"""The metric of phases that get slower."""

from __future__ import annotations

from grpo_run.runtime.features.phase_growth.events import GrownPhases
from grpo_run.runtime.metrics import Metric, RunObservation, Values, gauge
from grpo_run.watchdog.observation import Phase


def phase_growth(run: RunObservation) -> Values:
    """By phase, how many times as long it took as at the beginning; of callbacks the most."""
    ratios: dict[str, float] = {}
    for name, (factor, _) in run.history.part(GrownPhases).found.items():
        phase = name if name in Phase.__members__ else Phase.callback.name
        ratios[phase] = max(factor, ratios.get(phase, 0.0))
    return ratios


METRICS: tuple[Metric[RunObservation], ...] = (
    gauge("grpo_phase_growth_ratio", "ratio", phase_growth,
          "How many times as long a phase took for the same work as at the beginning, when it was found to"
          " get slower; absent before. Callbacks count as one phase.", "phase"),
)  # fmt: skip
