"""The row of the Grafana dashboard about memory. Called by `rows.py`, which says how rows are made."""

from __future__ import annotations

from grpo_run.dashboards.provisioning.panels import BuiltPanel, row, time_series


def memory_rows(run: str) -> list[BuiltPanel]:
    """Return the row's panels.

    Args:
        run: the label matcher that selects the run.
    """
    return [
        row("Memory"),
        time_series(
            "GPU memory by rank", width=12, height=8, unit="bytes",
            queries={
                "rank {{rank}}, allocated": f"max by (rank) (grpo_rank_gpu_memory_allocated_bytes{{{run}}})",
                "rank {{rank}}, reserved": f"max by (rank) (grpo_rank_gpu_memory_reserved_bytes{{{run}}})",
                "rank {{rank}}, not returnable": f"max by (rank) (grpo_rank_gpu_memory_inactive_split_bytes{{{run}}})",
                "GPU": f"max(grpo_rank_gpu_memory_capacity_bytes{{{run}}})",
            },
            description="What tensors use, what torch holds for them, and the unused parts of it that cannot be returned."
            " A rising allocated line is a leak; a reserved line far above it is fragmentation.",
        ),
        time_series(
            "Highest GPU memory by phase", width=12, height=8, unit="bytes",
            queries={"{{phase}}": f"max by (phase) (grpo_rank_gpu_memory_peak_bytes{{{run}}})"},
            description="Most memory that tensors of any rank have used in each phase of this attempt.",
        ),
        time_series(
            "Forecast of the peak, and observed", width=12, height=8, unit="bytes",
            queries={
                "rank {{rank}}, predicted": f"max by (rank) (grpo_rank_memory_predicted_bytes{{{run}}}) > 0",
                "rank {{rank}}, observed": f"max by (rank) (grpo_rank_memory_observed_bytes{{{run}}}) > 0",
                "limit": f"min(grpo_rank_memory_limit_bytes{{{run}}} > 0)",
            },
            description="What was predicted for the steps of each rollout before they began, the highest peak measured in them,"
            " and the least that a rank may use.",
        ),
        time_series(
            "Pieces of micro-batches", width=12, height=8, unit="short", decimals=0,
            queries={
                "pieces": f"max(grpo_micro_batch_pieces{{{run}}})",
                "split rollouts": f"max(grpo_split_rollouts_total{{{run}}})",
            },
            description="Into how many pieces micro-batches are split because whole ones were predicted not to fit, and for"
            " how many rollouts of this attempt.",
        ),
        time_series(
            "Allocations that needed memory back, and that failed", width=12, height=8, unit="short", decimals=0,
            queries={
                "rank {{rank}}, retried": f"max by (rank) (grpo_rank_gpu_alloc_retries_total{{{run}}}) > 0",
                "rank {{rank}}, failed": f"max by (rank) (grpo_rank_gpu_ooms_total{{{run}}}) > 0",
            },
            description="Allocations for which torch had to return all its caches first, and those that failed."
            " Empty if there were none.",
        ),
        time_series(
            "Freed by memory hygiene", width=12, height=8, unit="bytes",
            queries={
                "rank {{rank}}, host": f"max by (rank) (grpo_rank_hygiene_freed_bytes_total{{{run}}}) > 0",
                "rank {{rank}}, GPU": f"max by (rank) (grpo_rank_hygiene_released_bytes_total{{{run}}}) > 0",
            },
            description="Host memory freed by collecting garbage, and GPU memory returned to the device, in this attempt."
            " Empty if there was none to free.",
        ),
        time_series(
            "Time measuring memory", width=12, height=8, unit="percentunit",
            queries={
                "rank {{rank}}": "max by (rank)"
                f" (rate(grpo_rank_memory_accounting_seconds_total{{{run}}}[$__rate_interval]))",
            },
            description="Fraction of time each rank spends on measuring the memory of its phases.",
        ),
        time_series(
            "Highest host memory by phase", width=12, height=8, unit="bytes",
            queries={"rank {{rank}}, {{phase}}": f"max by (rank, phase) (grpo_rank_resident_peak_bytes{{{run}}})"},
            description="Most host memory known of each rank in each phase of this attempt, shared memory included.",
        ),
    ]  # fmt: skip
