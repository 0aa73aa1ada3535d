"""The metrics of replicas."""

from __future__ import annotations

from grpo_run.runtime.features.replicas.events import Replicas
from grpo_run.runtime.metrics import Metric, RunObservation, counter, gauge

METRICS: tuple[Metric[RunObservation], ...] = (
    counter("grpo_replica_differences_total", "count",
            lambda run: len(run.history.part(Replicas).differences),
            "How often ranks held different values of what they have in common."),
    gauge("grpo_replica_tensors", "count", lambda run: run.history.part(Replicas).tensors,
          "Tensors that ranks hold in common and compare; 0 if nothing is compared."),
)  # fmt: skip
