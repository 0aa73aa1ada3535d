"""A rank that runs out of memory in the script's own code is named, with the phase, and its peers are not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import containers
from support.runs import BIN, SCRIPTS, Run

IN_SMALL_SHARED_MEMORY = (
    "unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=8m tmpfs /dev/shm && exec "$0" "$@"', str(BIN / "grpo-run"),
)  # fmt: skip
DIES = """
import ctypes, mmap, os, pathlib
import torch
torch.distributed.init_process_group("gloo")
marker = pathlib.Path("died")
if torch.distributed.get_rank() == 1 and not marker.exists():
    marker.touch()
    {fault}
torch.distributed.barrier()
"""
THROWS = "ctypes.CDLL('libstdc++.so.6')._ZSt17__throw_bad_allocv()"
FILLS = "memory = os.open('/dev/shm/big', os.O_RDWR | os.O_CREAT); os.ftruncate(memory, 1 << 26); mmap.mmap(memory, 1 << 26).write(bytes(1 << 26))"
LAUNCHED = ("--nproc-per-node", "2", str(SCRIPTS / "exhausted.py"), "--output-dir", "out", "--max-steps", "4")


def verdicts(run: Run) -> list[dict[str, Any]]:
    """The verdicts of the run's incidents, in order."""
    folders = sorted((run.directory / "incidents").iterdir())
    return [json.loads((folder / "verdict.json").read_text()) for folder in folders]


def test_exhausted_memory_at_the_first_step_is_named_and_a_quotation_is_not(runs: Callable[..., Run]) -> None:
    """The reward of this script prints such a message in every call, and an error of its own quotes it in step 3."""
    run = runs(*LAUNCHED, "--place", "backward@1", "--place", "quoted@3").start()
    assert run.wait(180) == 0, run.tail()
    first, second = verdicts(run)
    assert (first["cause"], first["culprits"], first["waiters"]) == ("gpu_oom", [1], [0]), first["sentence"]
    assert first["sentence"] == (
        "Rank 1 ran out of GPU memory in step 1 (phase backward): tried to allocate 1.5 GiB with 1.2 GiB of 79.2 GiB free."
    )
    assert first["shortage"]["phase"] == "backward"
    assert first["location"]["function"] == "_fail"
    (event, _) = run.events("incident")
    assert event["shortage"] == first["shortage"]
    assert event["lost_connection"] == [0], event
    assert (second["cause"], second["shortage"]) == ("exception", None), second["sentence"]


@pytest.mark.full
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("place", ["generate", "score", "forward", "backward", "optimizer"])
def test_the_phase_that_died_is_found_wherever_it_is(runs: Callable[..., Run], place: str, rank: int) -> None:
    """In the middle of a rollout of two steps, with two micro-batches each."""
    run = runs(
        *LAUNCHED, "--place", f"{place}@{1 if place in ('generate', 'score') else 2}", "--fault-rank", str(rank),
        "--gradient-accumulation-steps", "2", "--steps-per-generation", "4",
    ).start()  # fmt: skip
    assert run.wait(180) == 0, run.tail()
    (verdict,) = verdicts(run)
    assert (verdict["cause"], verdict["culprits"]) == ("gpu_oom", [rank]), verdict["sentence"]
    assert verdict["shortage"]["phase"] == place


@pytest.mark.full
def test_an_exception_of_cplusplus_that_ends_a_rank_is_named(
    runs: Callable[..., Run], tmp_path: Path
) -> None:
    """The process is aborted and leaves nothing but what the C++ runtime prints; the first failed start is tried again."""
    (tmp_path / "dies.py").write_text(DIES.format(fault=THROWS))
    run = runs("--nproc-per-node", "2", "dies.py").start()
    assert run.wait(120) == 0, run.tail()
    (verdict,) = verdicts(run)
    assert (verdict["cause"], verdict["culprits"]) == ("host_oom", [1]), verdict["sentence"]
    assert verdict["sentence"] == "Rank 1 ran out of host memory before the first step: std::bad_alloc."


@pytest.mark.full
@pytest.mark.skipif(containers.missing() is not None, reason=str(containers.missing()))
def test_a_write_into_a_full_shared_memory_is_named(runs: Callable[..., Run], tmp_path: Path) -> None:
    """The kernel sends SIGBUS; /dev/shm has 8 MiB here."""
    (tmp_path / "dies.py").write_text(DIES.format(fault=FILLS))
    run = runs("--nproc-per-node", "2", "dies.py", program=IN_SMALL_SHARED_MEMORY, cold=True).start()
    assert run.wait(120) == 0, run.tail()
    (verdict,) = verdicts(run)
    assert (verdict["cause"], verdict["culprits"]) == ("shm_full", [1]), verdict["sentence"]
    assert "killed by SIGBUS" in verdict["sentence"]
