"""The sentences of what is found."""

from __future__ import annotations

import pytest

from grpo_run.runtime.features.memory_trace._finding import describe
from grpo_run.runtime.features.memory_trace.events import MemoryFound, Site

HELD = "held by list `history` of Collector (trl/collector.py:40): "
SENTENCES = {
    "growth": (
        f"made at policy.py:133, {HELD}it has kept tensors of 5 steps, 1.0 MiB a step, which does not fit"
        " into 2.0 MiB for the 9 steps that are left; bound it, or keep less"
    ),
    "graph": (
        f"made at policy.py:133, saved by an autograd graph that is {HELD}nothing has run backward through it"
        " in 5 steps; compute it under torch.no_grad(), or detach it"
    ),
    "growing": f"made at policy.py:133, {HELD}it has kept tensors of 5 steps; cannot tell whether that ends",
}


@pytest.mark.parametrize("kind", SENTENCES)
def test_a_finding_is_one_line_that_names_line_and_holder(kind: str) -> None:
    """Paths are relative to the working directory, or to the folder of the installed packages."""
    found = MemoryFound(
        kind=kind, tensors=64, bytes=64 * 8 * 174 * 50257 * 4, shape=(8, 174, 50257), dtype="float32",
        since_step=3, steps=5, made_at=Site("/home/policy.py", 133), holder="list `history` of Collector",
        held_at=Site("/lib/site-packages/trl/collector.py", 40),
        details={"bytes_a_step": 2**20, "steps_left": 9, "free_bytes": 2**21},
        world_size=1, key="", subject="", sentence="",
    )  # fmt: skip
    what = "64 tensors [8, 174, 50257] float32 (16.7 GiB) alive since step 3, "
    still = "still growing: " if kind == "growing" else ""
    describe(found, "/home")
    assert found.sentence == still + what + SENTENCES[kind]
