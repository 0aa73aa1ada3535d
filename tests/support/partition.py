"""Checks of what a rank holds in each parallelism mode, from the record of `tests/scripts/partition.py`."""

from __future__ import annotations

from typing import Any

RANKS = 2


def check_partition(mode: str, rank: dict[str, Any]) -> None:
    """Check what one rank holds. `elements` counts the whole model."""
    share = rank["elements"] / RANKS
    assert rank["world_size"] == RANKS
    if mode == "ddp":
        assert rank["distributed_type"] == "MULTI_CPU"
        assert rank["local_elements"] == rank["optimizer_elements"] == rank["elements"]
    elif mode == "zero2":
        assert (rank["distributed_type"], rank["zero_stage"]) == ("DEEPSPEED", 2)
        assert rank["local_elements"] == rank["elements"]
        assert 0 < rank["optimizer_elements"] < share * 1.1
    elif mode == "zero3":
        assert (rank["distributed_type"], rank["zero_stage"]) == ("DEEPSPEED", 3)
        assert rank["local_elements"] == 0
        assert rank["zero_not_available"] == rank["parameters"]
        assert 0 < rank["optimizer_elements"] < share * 1.1
    else:
        assert rank["distributed_type"] == "FSDP"
        assert rank["sharded_dtensors"] == rank["parameters"]
        assert 0 < rank["local_elements"] < share * 1.1
        assert rank["optimizer_elements"] == rank["local_elements"]
