"""The sentence about a stuck rank."""

from __future__ import annotations

import math

import pytest

from grpo_run.watchdog.waits.looks import Wait, WaitKind
from grpo_run.watchdog.waits.proof import StuckRank
from grpo_run.watchdog.waits.sentences import ANOTHER_THREAD, describe_stuck, name_lock

LIBRARY = "/usr/lib/python3.11"


def stuck(kind: WaitKind, until: float = math.inf, **facts: object) -> StuckRank:
    """A stuck rank."""
    return StuckRank(wait=Wait(kind=kind, **facts), until_seconds=until, by_stop=False)  # type: ignore[arg-type]


def test_ranks_that_wait_alike_share_a_clause() -> None:
    """The ranks are named once."""
    futex = stuck(WaitKind.futex)
    assert describe_stuck({1: futex}, now=0.0) == f"Rank 1 waits for {ANOTHER_THREAD}."
    assert describe_stuck({0: futex, 1: futex}, now=0.0) == f"Ranks 0 and 1 wait for {ANOTHER_THREAD}."
    both = describe_stuck({0: stuck(WaitKind.child), 1: futex}, now=0.0)
    assert both == f"Rank 0 waits for a child process that cannot end and rank 1 waits for {ANOTHER_THREAD}."


def test_a_sleep_says_how_long_it_lasts() -> None:
    """From now on."""
    text = describe_stuck({1: stuck(WaitKind.sleep, 100_500.0)}, now=500.0)
    assert text == "Rank 1 waits for the end of a sleep, and nothing else runs in it for another 100,000 s."


def test_a_rank_at_its_end_did_not_exit() -> None:
    """The scripts are complete."""
    text = describe_stuck({1: stuck(WaitKind.child)}, now=0.0, exiting=True)
    assert text.startswith("Rank 1 did not exit after the script's last line and waits for a child")


@pytest.mark.parametrize(
    ("calls", "what"),
    [
        ([("train.py", "on_step_end")], "a lock"),
        ([("threading.py", "wait"), ("queue.py", "get"), ("train.py", "reward")], "a queue"),
        ([("threading.py", "wait"), ("threading.py", "wait"), ("train.py", "f")], "an event"),
        ([("threading.py", "_wait_for_tstate_lock"), ("threading.py", "join"), ("t.py", "f")], "a thread"),
        ([("threading.py", "wait"), ("concurrent/futures/_base.py", "result"), ("t.py", "f")], "a future"),
        ([("native.so", "wait"), ("queue.py", "get")], "a lock"),
    ],
)
def test_the_calls_around_a_futex_name_what_it_is(calls: list[tuple[str, str]], what: str) -> None:
    """The innermost calls of the standard library, up to the user's."""
    paths = [(f"{LIBRARY}/{file}" if file[0] in "tqc" else file, function) for file, function in calls]
    assert name_lock(paths).startswith(f"{what} ") or name_lock(paths).startswith(f"{what} that")
