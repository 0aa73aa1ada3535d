"""Whole scripts that keep something of each step: mistakes are alarms, mere growth is a notice."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest

from grpo_run.runtime.features.memory_trace.events import MemoryFound

RunScript = Callable[..., list[MemoryFound]]

GRAPHS = {
    "losses": ("list `kept` of Trainer", """
        class Trainer:
            def __init__(self): self.kept, self.layer = [], torch.nn.Linear(40, 40)
            def step(self): self.kept.append(self.layer(made()).pow(2).sum())
        trainer = Trainer()
        for _ in range(8): trainer.step()
    """),
    "sum_of_losses": ("tensor `total`", """
        layer, total = torch.nn.Linear(40, 40), 0
        for _ in range(12): total = total + layer(made()).pow(2).sum()
    """),
    "attribute_of_a_context": ("list `kept`", """
        class Twice(torch.autograd.Function):
            @staticmethod
            def forward(ctx, one):
                ctx.kept = one * 2
                return one.clone()
            @staticmethod
            def backward(ctx, gradient): return gradient * 2
        kept = []
        for _ in range(32): kept.append(Twice.apply(made().requires_grad_()).sum())
    """),
}  # fmt: skip
"""Scripts that keep autograd graphs, with the holder that is named."""

HOLDERS = {
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
    "attribute_of_a_model": ("a list in dict `kept` of Linear", """
        model = torch.nn.Linear(4, 4)
        model.kept = {"logits": []}
        for _ in range(32): model.kept["logits"].append(made())
    """),
    "generator": ("a list in generator `collected`", """
        def collect():
            kept = []
            while True: kept.append((yield))
        collected = collect()
        next(collected)
        for _ in range(32): collected.send(made())
    """),
}  # fmt: skip
"""Scripts whose memory grows, with the holder that is named."""


@pytest.mark.parametrize("name", GRAPHS)
def test_a_kept_graph_is_an_alarm(name: str, run_script: RunScript) -> None:
    """After a few steps, whether or not the graphs are dropped one day."""
    holder, source = GRAPHS[name]
    found = run_script(source)
    assert [(one.kind, holder in one.holder) for one in found] == [("graph", True)], found


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
    assert ["dict `kept` in main()" in one.holder for one in found] == [True]


@pytest.mark.parametrize("name", HOLDERS)
def test_a_holder_that_merely_grows_is_a_notice(name: str, run_script: RunScript) -> None:
    """Once it has something of 20 steps: nobody can tell from outside whether that ends."""
    holder, source = HOLDERS[name]
    found = run_script(source)
    assert [(one.kind, holder in one.holder) for one in found] == [("growing", True)], found
    latest = 40 if name == "all_epochs" else 25  # a container has several items
    assert 20 <= found[0].steps <= latest
    assert found[0].made_at is not None


def test_growth_that_will_not_fit_is_an_alarm(run_script: RunScript) -> None:
    """It takes more than a tenth of the memory after 20 steps, and 1,000 are to come. With more memory it is
    a notice first.
    """
    source = HOLDERS["list_of_an_instance"][1].replace("32", "70")
    (found,) = run_script(source, free=20_000)
    assert (found.kind, found.holder) == ("growth", HOLDERS["list_of_an_instance"][0])
    assert "160 bytes a step, which does not fit into 20 KiB for the 97" in found.sentence
    assert [one.kind for one in run_script(source, free=60_000)] == ["growing", "growth"]


def test_several_holders_are_found_beside_one_another(run_script: RunScript) -> None:
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
    assert [(one.kind, one.holder) for one in found] == [
        ("graph", "list `losses`"),
        ("growing", "dict `kept`"),
    ]
