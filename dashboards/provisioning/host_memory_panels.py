"""The panels of the Grafana dashboard about the host's memory. Called by `rows.py`, which says how rows are made."""

from __future__ import annotations

from grpo_run.dashboards.provisioning.panels import BuiltPanel, time_series


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
            description="The nearest limit: of a memory cgroup or of the machine. The kernel kills a process when the working set"
            " reaches it; page cache is freed before.",
        ),
        time_series(
            "Host memory by process", width=12, height=8, unit="bytes",
            queries={
                "rank {{rank}}, {{kind}}": f"max by (rank, kind) (grpo_rank_host_memory_bytes{{{run}}}) > 0",
                "{{helper}}": f"max by (helper) (grpo_helper_memory_bytes{{{run}}}) > 0",
            },
            description="Ranks by kind of memory; data-loader workers and other processes of the ranks; grpo-run itself.",
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
            description="How often memory became short, restarts that were made before the kernel would have killed a rank, and the"
            " share of time in which every process waited for memory. Empty if there was none.",
        ),
    ]  # fmt: skip
