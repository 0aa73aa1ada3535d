"""Who holds a tensor, named as the script names it."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

from grpo_run.runtime.rank.memory_trace._holders import Holder, find_holder, name_of
from grpo_run.runtime.rank.memory_trace._referrers import running_locals

MANY = 5


class Collector:
    """Holds tensors."""

    def __init__(self) -> None:
        self.history: list[Any] = []


def holder_of(add: Callable[[torch.Tensor], object]) -> Holder:
    """The holder of many tensors that were added."""
    made = [torch.zeros(64) for _ in range(MANY)]
    for tensor in made:
        add(tensor)
    start = [made[2]]
    del made, tensor
    found = find_holder(start, lambda held: len(held) >= MANY, {torch.Tensor}, ())
    assert found is not None
    return found


def test_a_list_of_an_instance_is_named_by_attribute_class_and_line() -> None:
    """Also if the tensors are in dictionaries in the list."""
    collector = Collector()
    found = holder_of(lambda made: collector.history.append({"logits": made}))
    assert str(found) == "list `history` of Collector"
    assert found.name is not None
    assert found.name.site is not None
    assert (found.name.site.file, found.name.site.line) == (
        __file__,
        Collector.__init__.__code__.co_firstlineno,
    )


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
        assert name_of(tensor, ()) is not None
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
