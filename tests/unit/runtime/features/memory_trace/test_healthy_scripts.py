"""Whole scripts that keep nothing without need: no alarm, and no notice either of what is full."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from grpo_run.runtime.features.memory_trace.events import MemoryFound

RunScript = Callable[..., list[MemoryFound]]

FULL = {
    "bounded_deque": """
        from collections import deque
        kept = deque(maxlen=40)
        for _ in range(70): kept.append(made())
    """,
    "replay_buffer": """
        kept = []
        for _ in range(60):
            kept.append(made())
            if len(kept) > 12: del kept[0]
    """,
    "ring": """
        kept = []
        for step in range(60):
            if len(kept) < 12: kept.append(made())
            else: kept[step % 12] = made()
    """,
    "cache_of_functools": """
        import functools
        @functools.lru_cache(maxsize=12)
        def embedded(step): return made()
        for step in range(60): embedded(step)
    """,
    "log_of_losses": """
        log = []
        for _ in range(60): log.append((float(made().mean()), torch.ones(())))
    """,
    "bounded_objects_in_a_list": """
        from collections import deque
        callbacks = [deque(maxlen=40), deque(maxlen=3)]
        for _ in range(60):
            one = made()
            callbacks[0].append(one)
            callbacks[1].append(one + 1)
    """,
    "lists_of_an_epoch": """
        def epoch():
            kept, average = [], torch.zeros(40)
            for _ in range(15):
                kept.append(made())
                average = 0.9 * average + 0.1 * kept[-1]
        for _ in range(5): epoch()
    """,
    "window_of_a_generator": """
        def window():
            kept = []
            while True:
                kept.append((yield kept))
                if len(kept) > 12: kept.pop(0)
        last = window()
        next(last)
        for _ in range(60): last.send(made())
    """,
}
"""Scripts whose containers are full, emptied, or replaced before they have grown for long."""

FILLING = {
    "large_replay_buffer": """
        from collections import deque
        kept = []
        for _ in range(140):
            kept.append(made())
            if len(kept) > 60: kept.pop(0)
    """,
    "cache_of_a_dataset": """
        kept = {}
        for step in range(140):
            row = step % 64
            if row not in kept: kept[row] = made()
            else: kept[row] = 0.5 * (kept[row] + made())
    """,
    "places_that_are_filled": """
        kept = [None] * 50
        for step in range(120): kept[step % 50] = made()
    """,
    "rollouts_of_a_long_epoch": """
        for _ in range(3): results = [made() for _ in range(40)]
    """,
}
"""Scripts whose memory grows for more than 20 steps before it stops."""


@pytest.mark.parametrize("name", FULL)
def test_nothing_is_said_of_what_is_full_or_replaced(name: str, run_script: RunScript) -> None:
    """Nor of what a script computes anew in each step."""
    assert run_script(FULL[name], free=50_000) == []


@pytest.mark.parametrize("name", FILLING)
def test_what_may_end_is_at_most_a_notice(name: str, run_script: RunScript) -> None:
    """Said once, though at its rate it would not fit: it takes too little of the memory to be sure."""
    found = [one.kind for one in run_script(FILLING[name], free=150_000)]
    assert found in ([], ["growing"])
