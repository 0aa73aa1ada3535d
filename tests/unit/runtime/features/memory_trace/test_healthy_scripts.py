"""Whole scripts that keep tensors of a few steps: nothing is found."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from grpo_run.runtime.features.memory_trace.events import MemoryFound

RunScript = Callable[..., list[MemoryFound]]

FULL = {
    "bounded_deque": """
        from collections import deque
        kept = deque(maxlen=15)
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
        callbacks = [deque(maxlen=15), deque(maxlen=3)]
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
"""Scripts whose containers are full, emptied, or replaced before they have tensors of many steps."""


@pytest.mark.parametrize("name", FULL)
def test_nothing_is_said_of_what_is_full_or_replaced(name: str, run_script: RunScript) -> None:
    """Nor of what a script computes anew in each step."""
    assert run_script(FULL[name]) == []
