"""Memory is released when the ranks have agreed on it, and only where that is safe."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from support.builders.trainers.callback_loop import Events, Loop, Reading

from grpo_run.runtime.rank.memory.cleanup_policy import StepMemory


def growing(session: Any) -> None:
    """Let the memory of the rank grow by 1 GiB in each step, and consider it every second step."""
    sizes = itertools.count(1)

    def step_ended() -> StepMemory:
        size = next(sizes) * 2**30
        return StepMemory(
            allocated=0, reserved=0, peak_allocated=0, resident=size, anonymous=size, capacity=0
        )

    session.config = replace(session.config, cleanup_every=2)
    session.accounting = SimpleNamespace(step_ended=step_ended)


def test_cleanup_follows_the_vote_on_it(session: Any, events: Events, reading: Reading) -> None:
    """Steps 1 to 3 are not looked at, 4 and 5 are compared with 6 and 7, and the vote on step 8 is collected
    before step 9 ends.
    """
    growing(session)
    loop = Loop(session)
    loop.begin()
    for _ in range(8):
        loop.step()
    assert reading().cleanup_runs == 0
    loop.step()
    (record,) = [record for record in events() if record["event"] == "cleanup"]
    assert (record["step"], record["garbage"], record["caches"]) == (9, True, False)
    assert reading().cleanup_runs == 1


def test_there_is_no_cleanup_beside_a_vllm_engine_that_sleeps(session: Any, reading: Reading) -> None:
    """Between two rollouts its memory is not mapped."""
    growing(session)
    loop = Loop(session)
    loop.args = SimpleNamespace(use_vllm=True, vllm_enable_sleep_mode=True)
    loop.begin()
    for _ in range(12):
        loop.step()
    assert reading().cleanup_runs == 0
