"""A cluster of three hosts for each test of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.slurm import Cluster, cluster, missing


@pytest.fixture
def slurm(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """The cluster, or the reason why there is none. Its parameter is how Slurm knows a job's processes."""
    if missing():
        pytest.skip(missing())
    with cluster(tmp_path, 3, proctrack=getattr(request, "param", "cgroup")) as made:
        yield made
