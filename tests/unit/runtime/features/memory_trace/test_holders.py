"""Looking for the holder of a tensor changes nothing."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import torch

from grpo_run.runtime.features.memory_trace._holders import name_of, running_locals


def test_looking_at_frames_keeps_nothing_alive() -> None:
    """Neither as copies of local variables, nor as a cycle of frames, nor by what looks for a name."""
    ready, done = threading.Event(), threading.Event()
    other = threading.Thread(target=lambda: (ready.set(), done.wait(10)))
    other.start()
    ready.wait(10)
    gc.disable()
    try:
        tensor = torch.zeros(64)
        freed = weakref.ref(tensor)
        assert id(tensor) in running_locals()
        assert name_of(tensor) is not None
        del tensor
        assert freed() is None
    finally:
        gc.enable()
        done.set()
        other.join()


def test_a_copy_of_the_variables_that_the_script_keeps_stays() -> None:
    """`locals()` gives that of the frame before Python 3.13. A script may keep it as its settings."""

    def main(learning_rate: float = 1e-6) -> dict[str, Any]:
        settings = locals()
        running_locals()
        return settings

    assert main()["learning_rate"] == 1e-6
