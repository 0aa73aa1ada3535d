"""Memory of the host runs out: the kernel kills a rank in a real memory cgroup, or the supervisor acts before it does."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support import memory_cgroups
from support.memory_cgroups import MemoryCgroup, memory_cgroup
from support.references import undisturbed
from support.runs import SCRIPTS, Run, digest

pytestmark = pytest.mark.skipif(memory_cgroups.missing() is not None, reason=str(memory_cgroups.missing()))
LIMIT_BYTES = 1200 << 20


@pytest.fixture
def group() -> Iterator[MemoryCgroup]:
    """A memory cgroup in which the script runs with some hundred MiB to spare."""
    with memory_cgroup(LIMIT_BYTES) as made:
        yield made


def test_a_rank_that_the_kernel_kills_is_named_and_the_run_resumes(
    group: MemoryCgroup, runs: Callable[..., Run], tmp_path: Path
) -> None:
    """`host_oom` with limit and use, the supervisor alive, and the weights of the undisturbed run."""
    run = runs(
        "--nproc-per-node", "2", "--snapshot-every", "1", str(SCRIPTS / "memory.py"), "--output-dir", "out",
        "--max-steps", "12", "--save-steps", "4", "--all-at", "6", program=group.program,
    ).start()  # fmt: skip
    try:
        assert run.wait() == 0, run.tail()
    finally:
        run.close()
    assert digest(tmp_path / "out") == undisturbed("sft.py", 12)
    (recovery,) = run.status()["recoveries"]
    assert (recovery["cause"], recovery["rank"], recovery["action"]) == ("host_oom", 1, "restart")
    assert group.kills() == 1
    (incident,) = (run.directory / "incidents").iterdir()
    sentence = json.loads((incident / "verdict.json").read_text())["sentence"]
    assert f"The memory cgroup {group.folder} had " in sentence
    assert " of 1200 MiB in use " in sentence
    assert "rose from 0 to 1" in sentence
