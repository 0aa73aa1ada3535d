"""The panels of the dashboard "Memory": of GPUs by rank and phase, of the host, and what frees it.

Called by `_grafana.py`. How a panel looks is in `_panels.py`.
"""

from __future__ import annotations

from grpo_run.dashboards.provisioning._panels import BuiltPanel, lines, row


def memory() -> list[BuiltPanel]:
    """Return the panels, from top to bottom."""
    return [
        row("GPU memory"),
        lines(
            "GPU memory by rank", "bytes",
            {
                "rank {{rank}}, allocated": "max by (rank) (grpo_rank_gpu_memory_allocated_bytes{RUN})",
                "rank {{rank}}, reserved": "max by (rank) (grpo_rank_gpu_memory_reserved_bytes{RUN})",
                "rank {{rank}}, not returnable":
                    "max by (rank) (grpo_rank_gpu_memory_inactive_split_bytes{RUN})",
                "GPU": "max(grpo_rank_gpu_memory_capacity_bytes{RUN})",
            },
            "What tensors use, what torch holds for them, and the unused parts of it that cannot be returned."
            " A rising allocated line is a leak; a reserved line far above it is fragmentation.",
        ),
        lines(
            "Highest GPU memory by phase", "bytes",
            {"{{phase}}": "max by (phase) (grpo_rank_gpu_memory_peak_bytes{RUN})"},
            "Most memory that tensors of any rank have used in each phase of this attempt.",
        ),
        lines(
            "Forecast of the peak, and observed", "bytes",
            {
                "rank {{rank}}, predicted": "max by (rank) (grpo_rank_memory_predicted_bytes{RUN}) > 0",
                "rank {{rank}}, observed": "max by (rank) (grpo_rank_memory_observed_bytes{RUN}) > 0",
                "limit": "min(grpo_rank_memory_limit_bytes{RUN} > 0)",
            },
            "What was predicted for the steps of each rollout before they began, the highest peak measured in"
            " them, and the least that a rank may use.",
        ),
        lines(
            "Pieces of micro-batches", "short",
            {
                "pieces": "max(grpo_micro_batch_pieces{RUN})",
                "split rollouts": "max(grpo_split_rollouts_total{RUN})",
            },
            "Into how many pieces micro-batches are split because whole ones were predicted not to fit, and"
            " for how many rollouts.",
            decimals=0,
        ),
        lines(
            "Allocations that needed memory back, and that failed", "short",
            {
                "rank {{rank}}, retried": "max by (rank) (grpo_rank_gpu_alloc_retries_total{RUN}) > 0",
                "rank {{rank}}, failed": "max by (rank) (grpo_rank_gpu_ooms_total{RUN}) > 0",
            },
            "Allocations for which torch had to return all its caches first, and those that failed. Empty if"
            " there were none.",
            decimals=0,
        ),
        lines(
            "Freed by memory cleanup", "bytes",
            {
                "rank {{rank}}, host": "max by (rank) (grpo_rank_cleanup_freed_bytes_total{RUN}) > 0",
                "rank {{rank}}, GPU": "max by (rank) (grpo_rank_cleanup_released_bytes_total{RUN}) > 0",
            },
            "Host memory freed by collecting garbage, and GPU memory returned to the device. Empty if there"
            " was none to free.",
        ),
        lines(
            "Time in memory cleanup", "percentunit",
            {"rank {{rank}}": "max by (rank) (rate(grpo_rank_cleanup_seconds_total{RUN}[$__rate_interval]))"},
            "Fraction of time spent on garbage collection and on returning memory to the system.",
        ),
        lines(
            "Time measuring memory", "percentunit",
            {
                "rank {{rank}}":
                    "max by (rank) (rate(grpo_rank_memory_accounting_seconds_total{RUN}[$__rate_interval]))"
            },
            "Fraction of time each rank spends on measuring the memory of its phases.",
        ),
        row("Host memory"),
        lines(
            "Host memory and its limit", "bytes",
            {
                "limit": "max(grpo_host_memory_limit_bytes{RUN})",
                "working set": "max(grpo_host_memory_working_set_bytes{RUN})",
                "with page cache": "max(grpo_host_memory_usage_bytes{RUN})",
                "snapshots": "max(grpo_snapshot_memory_bytes{RUN})",
            },
            "The nearest limit: of a memory cgroup or of the machine. The kernel kills a process when the"
            " working set reaches it; page cache is freed before.",
        ),
        lines(
            "Host memory by process", "bytes",
            {
                "rank {{rank}}, {{kind}}": "max by (rank, kind) (grpo_rank_host_memory_bytes{RUN}) > 0",
                "{{helper}}": "max by (helper) (grpo_helper_memory_bytes{RUN}) > 0",
            },
            "Ranks by kind of memory; data-loader workers and other processes of the ranks; grpo-run itself.",
        ),
        lines(
            "Highest host memory by phase", "bytes",
            {"rank {{rank}}, {{phase}}": "max by (rank, phase) (grpo_rank_resident_peak_bytes{RUN})"},
            "Most host memory known of each rank in each phase of this attempt, shared memory included.",
        ),
        lines(
            "Shared memory (/dev/shm)", "bytes",
            {
                "used": "max(grpo_shared_memory_used_bytes{RUN})",
                "size": "max(grpo_shared_memory_size_bytes{RUN})",
            },
            "Space of /dev/shm, which data loaders, NCCL and snapshots share.",
        ),
        lines(
            "Short host memory", "short",
            {
                "became short": "max(grpo_host_memory_short_total{RUN}) > 0",
                "restarts before it ran out": "max(grpo_host_memory_restarts_total{RUN}) > 0",
                "waiting for memory": "max(grpo_host_memory_full_pressure_ratio{RUN}) > 0",
            },
            "How often memory became short, restarts that were made before the kernel would have killed a"
            " rank, and the share of time in which every process waited for memory. Empty if there was none.",
            width=24, decimals=0,
        ),
    ]  # fmt: skip
