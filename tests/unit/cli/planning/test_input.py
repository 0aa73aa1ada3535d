"""`grpo-run plan`: bad input, and the job that options and settings make. Nothing is traced."""

from __future__ import annotations

from grpo_run.cli.planning.options import parse_size

SHAPE = "layers=2,hidden=64,heads=4,kv-heads=2,intermediate=176,vocabulary=1000"


def test_sizes_are_decimal_or_binary() -> None:
    """GB is 10^9 bytes, GiB 2^30."""
    assert parse_size("--gpu", "22.65GB") == 22_650_000_000
    assert parse_size("--gpu", "80 GiB") == 80 << 30
