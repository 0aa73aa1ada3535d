"""The metrics of the rollout server."""

from __future__ import annotations

from grpo_run.runtime.features.rollout_server.events import RolloutServer, SampleOrigin
from grpo_run.runtime.metrics import Metric, RunObservation, Value, Values, counter, gauge


def _up(run: RunObservation) -> Value:
    """Whether a server that the run has started answers; None without one."""
    server = run.history.part(RolloutServer)
    return float(server.ready) if server.starts else None


def _samples(run: RunObservation) -> Values:
    """Samples by the policy that has made them."""
    samples = run.history.part(RolloutServer).samples
    return {origin.value: samples[origin.value] for origin in SampleOrigin}


METRICS: tuple[Metric[RunObservation], ...] = (
    gauge("grpo_rollout_server_up", "boolean", _up,
          "1 while the rollout server that the run has started answers, 0 while it starts or has failed."),
    counter("grpo_rollout_server_starts_total", "count", lambda run: run.history.part(RolloutServer).starts,
            "How often the run has started its rollout server."),
    counter("grpo_weight_syncs_total", "count", lambda run: run.history.part(RolloutServer).syncs,
            "How often the ranks have sent their weights to the rollout server."),
    counter("grpo_weight_sync_seconds_total", "seconds",
            lambda run: run.history.part(RolloutServer).sync_seconds,
            "Time that sending weights to the rollout server has taken."),
    counter("grpo_rollout_samples_total", "count", _samples,
            "Samples of the rollout server, by the policy that has made them: the one that was meant, a stale"
            " one (thrown away), or one that the server cannot tell.", "origin"),
)  # fmt: skip
