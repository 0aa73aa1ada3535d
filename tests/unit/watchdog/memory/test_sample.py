"""A sample survives its JSON form, and names the largest users first."""

from __future__ import annotations

import json

from grpo_run.watchdog.json_values import from_json, to_json
from grpo_run.watchdog.memory.host_sample import HostSample, LimitUse, ProcessMemory, describe_use

MEBIBYTE = 1 << 20
SAMPLE = HostSample(
    at=1000.0,
    limits=(
        LimitUse(
            name="the memory cgroup /job",
            limit_bytes=100 * MEBIBYTE,
            usage_bytes=99,
            working_set_bytes=9,
            shared_bytes=25 * MEBIBYTE + 10,
        ),
    ),
    ranks={
        0: ProcessMemory(anonymous_bytes=20 * MEBIBYTE, file_bytes=0, shared_bytes=0),
        1: ProcessMemory(anonymous_bytes=30 * MEBIBYTE, file_bytes=1, shared_bytes=2, pinned_bytes=3),
    },
    data_workers_bytes=40 * MEBIBYTE,
    staging_bytes=25 * MEBIBYTE,
    shm_used_bytes=90 * MEBIBYTE,
    kills=2,
)


def test_a_sample_is_read_as_it_was_written() -> None:
    """Through JSON, ranks as numbers again."""
    assert from_json(HostSample, json.loads(json.dumps(to_json(SAMPLE)))) == SAMPLE


def test_users_are_named_from_the_largest_and_small_ones_left_out() -> None:
    """Ten bytes of other shared memory are no user; unknown helpers are none either."""
    assert describe_use(SAMPLE, SAMPLE.nearest) == (
        "data-loader workers 40 MiB, rank 1 30 MiB, snapshots in memory 25 MiB, rank 0 20 MiB"
    )
