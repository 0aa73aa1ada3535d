"""The rows of the Grafana dashboard about memory: of GPUs by rank and phase, of the host, and what frees it.

Called by `_rows.py`, which has the other rows. How a panel looks is in `_panels.py`.
"""

from __future__ import annotations

from grpo_run.dashboards.provisioning._panels import BuiltPanel, row, time_series


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
                "rank {{rank}}, not returnable": f"max by (rank)"
                f" (grpo_rank_gpu_memory_inactive_split_bytes{{{run}}})",
                "GPU": f"max(grpo_rank_gpu_memory_capacity_bytes{{{run}}})",
            },
            description="What tensors use, what torch holds for them, and the unused parts of it that"
            " cannot be returned."
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
            description="What was predicted for the steps of each rollout before they began, the highest"
            " peak measured in them,"
            " and the least that a rank may use.",
        ),
        time_series(
            "Pieces of micro-batches", width=12, height=8, unit="short", decimals=0,
            queries={
                "pieces": f"max(grpo_micro_batch_pieces{{{run}}})",
                "split rollouts": f"max(grpo_split_rollouts_total{{{run}}})",
            },
            description="Into how many pieces micro-batches are split because whole ones were predicted not"
            " to fit, and for"
            " how many rollouts of this attempt.",
        ),
        time_series(
            "Allocations that needed memory back, and that failed", width=12, height=8, unit="short",
            decimals=0,
            queries={
                "rank {{rank}}, retried": f"max by (rank) (grpo_rank_gpu_alloc_retries_total{{{run}}}) > 0",
                "rank {{rank}}, failed": f"max by (rank) (grpo_rank_gpu_ooms_total{{{run}}}) > 0",
            },
            description="Allocations for which torch had to return all its caches first, and those"
            " that failed."
            " Empty if there were none.",
        ),
        time_series(
            "Freed by memory cleanup", width=12, height=8, unit="bytes",
            queries={
                "rank {{rank}}, host": f"max by (rank) (grpo_rank_cleanup_freed_bytes_total{{{run}}}) > 0",
                "rank {{rank}}, GPU": f"max by (rank) (grpo_rank_cleanup_released_bytes_total{{{run}}}) > 0",
            },
            description="Host memory freed by collecting garbage, and GPU memory returned to the device, in"
            " this attempt."
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
            queries={"rank {{rank}}, {{phase}}": f"max by (rank, phase)"
            f" (grpo_rank_resident_peak_bytes{{{run}}})"},
            description="Most host memory known of each rank in each phase of this attempt, shared"
            " memory included.",
        ),
    ]  # fmt: skip


def host_memory_panels(run: str) -> list[BuiltPanel]:
    """Return the panels, which belong to the row about memory.

    Args:
        run: the label matcher that selects the run.
    """
    return [
        time_series(
            "Host memory and its limit", width=12, height=8, unit="bytes",
            queries={
                "limit": f"max(grpo_host_memory_limit_bytes{{{run}}})",
                "working set": f"max(grpo_host_memory_working_set_bytes{{{run}}})",
                "with page cache": f"max(grpo_host_memory_usage_bytes{{{run}}})",
                "snapshots": f"max(grpo_snapshot_memory_bytes{{{run}}})",
            },
            description="The nearest limit: of a memory cgroup or of the machine. The kernel kills a"
            " process when the working set"
            " reaches it; page cache is freed before.",
        ),
        time_series(
            "Host memory by process", width=12, height=8, unit="bytes",
            queries={
                "rank {{rank}}, {{kind}}": f"max by (rank, kind) (grpo_rank_host_memory_bytes{{{run}}}) > 0",
                "{{helper}}": f"max by (helper) (grpo_helper_memory_bytes{{{run}}}) > 0",
            },
            description="Ranks by kind of memory; data-loader workers and other processes of the ranks;"
            " grpo-run itself.",
        ),
        time_series(
            "Shared memory (/dev/shm)", width=12, height=8, unit="bytes",
            queries={
                "used": f"max(grpo_shared_memory_used_bytes{{{run}}})",
                "size": f"max(grpo_shared_memory_size_bytes{{{run}}})",
            },
            description="Space of /dev/shm, which data loaders, NCCL and snapshots share.",
        ),
        time_series(
            "Short host memory", width=12, height=8, unit="short", decimals=0,
            queries={
                "became short": f"max(grpo_host_memory_short_total{{{run}}}) > 0",
                "restarts before it ran out": f"max(grpo_host_memory_restarts_total{{{run}}}) > 0",
                "waiting for memory": f"max(grpo_host_memory_full_pressure_ratio{{{run}}}) > 0",
            },
            description="How often memory became short, restarts that were made before the kernel would"
            " have killed a rank, and the"
            " share of time in which every process waited for memory. Empty if there was none.",
        ),
    ]  # fmt: skip
