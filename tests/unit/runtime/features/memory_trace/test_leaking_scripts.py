"""Whole scripts that keep something of each step: the container is named."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest

from grpo_run.runtime.features.memory_trace.events import MemoryFound

RunScript = Callable[..., list[MemoryFound]]

HOLDERS = {
    "losses_with_their_graphs": ("list `kept` of Trainer", """
        class Trainer:
            def __init__(self): self.kept, self.layer = [], torch.nn.Linear(40, 40)
            def step(self): self.kept.append(self.layer(made()).pow(2).sum())
        trainer = Trainer()
        for _ in range(32): trainer.step()
    """),
    "list_of_an_instance": ("list `history` of Collector", """
        class Collector:
            def __init__(self): self.history = []
        collector = Collector()
        for step in range(32): collector.history.append({"step": step, "tokens": made()})
    """),
    "all_epochs": ("list `kept`", """
        def epoch(): return [made() for _ in range(8)]
        kept = []
        for _ in range(8): kept.append(epoch())
    """),
    "new_dictionary_each_step": ("dict `kept` in main()", """
        def main():
            kept = {}
            for step in range(32): kept = {**kept, step: made()}
        main()
    """),
    "exceptions": ("list `errors`", """
        errors = []
        def score():
            batch = {"tokens": made()}
            raise ValueError(len(batch))
        for _ in range(32):
            try: score()
            except ValueError as error: errors.append(error)
    """),
    "attribute_of_a_model": ("list in dict `kept` of Linear", """
        model = torch.nn.Linear(4, 4)
        model.kept = {"logits": []}
        for _ in range(32): model.kept["logits"].append(made())
    """),
    "generator": ("list in generator `collected`", """
        def collect():
            kept = []
            while True: kept.append((yield))
        collected = collect()
        next(collected)
        for _ in range(32): collected.send(made())
    """),
}  # fmt: skip
"""Scripts whose memory grows, with the holder that is named."""


@pytest.mark.parametrize("allocations", [1, 5, 50])
def test_a_copy_that_is_about_to_get_its_name_is_not_the_holder(
    allocations: int, run_script: RunScript
) -> None:
    """Whenever garbage is collected, which changes the order in which objects are seen."""
    before = gc.get_threshold()
    gc.set_threshold(allocations)
    try:
        found = run_script(HOLDERS["new_dictionary_each_step"][1])
    finally:
        gc.set_threshold(*before)
    assert ["dict `kept` in main()" in one.key for one in found] == [True]


@pytest.mark.parametrize("name", HOLDERS)
def test_a_container_with_tensors_of_many_steps_is_named(name: str, run_script: RunScript) -> None:
    """Once, when it has something of 20 steps, with the line where its owner begins."""
    holder, source = HOLDERS[name]
    (found,) = run_script(source)
    assert found.key.startswith(holder)
    assert ("linear.py:" if name == "attribute_of_a_model" else "script_of_test.py") in found.key
    assert 20 <= found.steps <= (40 if name == "all_epochs" else 25)  # a container has several items
    assert ("its graphs keep more" in found.sentence) == (name == "losses_with_their_graphs")


def test_the_sentence_has_size_steps_and_place(run_script: RunScript) -> None:
    """Of an attribute the line of the class's `__init__`."""
    (found,) = run_script(HOLDERS["list_of_an_instance"][1])
    assert found.key.endswith("script_of_test.py:3)")
    assert found.sentence == (
        f"{found.key} holds 20 tensors (3.1 KiB) of 20 steps since step 1, the newest [40] float32: if that"
        " does not end, bound it, or keep less"
    )


def test_several_containers_are_found_beside_one_another(run_script: RunScript) -> None:
    """And beside a buffer that is full."""
    found = run_script("""
        from collections import deque
        layer, losses, kept, last = torch.nn.Linear(40, 40), [], {}, deque(maxlen=7)
        for step in range(40):
            one = made()
            losses.append(layer(one).pow(2).sum())
            kept[step] = one.clone()
            last.append(one * 2)
    """)
    assert sorted(one.key.partition(" (")[0] for one in found) == ["dict `kept`", "list `losses`"]
