"""Whole scripts that keep something of each step: mistakes are alarms, mere growth is a notice."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from grpo_run.runtime.rank.memory_trace import _finding as growth
from grpo_run.runtime.rank.memory_trace._census import FIRST_STEPS
from grpo_run.runtime.rank.memory_trace._finding import TraceFinding, sentence

RunScript = Callable[..., list[TraceFinding]]
LATEST = FIRST_STEPS + growth.GROWING + growth.ENOUGH
"""Steps of which a holder has something before it is reported at the latest."""

GRAPHS = {
    "losses": ("list `losses`", """
        layer, losses = torch.nn.Linear(40, 40), []
        for _ in range(12): losses.append(layer(made()).pow(2).sum())
    """),
    "sum_of_losses": ("tensor `total`", """
        layer, total = torch.nn.Linear(40, 40), 0
        for _ in range(12): total = total + layer(made()).pow(2).sum()
    """),
    "graphs_of_an_epoch": ("list `kept` in epoch()", """
        def epoch():
            kept = []
            for _ in range(12): kept.append((made().requires_grad_() * 2).exp().sum())
        epoch()
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
    "dictionary_by_step": ("dict `kept`", """
        kept = {}
        for step in range(32): kept[f"step_{step}"] = made()
    """),
    "lists_in_a_dictionary": ("a list in dict `kept`", """
        from collections import defaultdict
        kept = {"logits": []}
        for _ in range(32): kept["logits"].append(made())
    """),
    "all_epochs": ("list `kept`", """
        def epoch(): return [made() for _ in range(8)]
        kept = []
        for _ in range(8): kept.append(epoch())
    """),
    "generator": ("a list in generator `collected`", """
        def collect():
            kept = []
            while True: kept.append((yield))
        collected = collect()
        next(collected)
        for _ in range(32): collected.send(made())
    """),
    "default_of_a_keyword": ("a list in function `add`", """
        def add(one, *, kept=[]): kept.append(one)
        for _ in range(32): add(made())
    """),
    "hooks_of_a_layer": ("OrderedDict `_forward_hooks` of Linear", """
        model = torch.nn.Sequential(torch.nn.Linear(4, 4))
        for _ in range(32): model[0].register_forward_hook(lambda m, i, o, one=made(): None)
    """),
    "attribute_of_a_model": ("list `kept` of Linear", """
        model = torch.nn.Linear(4, 4)
        model.kept = []
        for _ in range(32): model.kept.append(made())
    """),
    "attribute_of_a_function": ("list `kept` of reward", """
        def reward(): pass
        reward.kept = []
        for _ in range(32): reward.kept.append(made())
    """),
    "never_trimmed": ("list `kept`", """
        kept = []
        for _ in range(32):
            kept.append(made())
            if len(kept) > 100_000: kept.pop()
    """),
    "longer_tensor": ("tensor `seen`", """
        seen = torch.zeros(0, 40)
        for _ in range(32): seen = torch.cat([seen, made()[None]])
    """),
}  # fmt: skip
"""Scripts whose memory grows, with the holder that is named."""


@pytest.mark.parametrize("name", GRAPHS)
def test_a_kept_graph_is_an_alarm(name: str, run_script: RunScript) -> None:
    """After a few steps, whether or not the graphs are dropped one day."""
    holder, source = GRAPHS[name]
    found = run_script(source)
    assert [(one.kind, holder in (one.holder or "")) for one in found] == [("graph", True)], found


@pytest.mark.parametrize("name", HOLDERS)
def test_a_holder_that_merely_grows_is_a_notice(name: str, run_script: RunScript) -> None:
    """Once it has something of 20 steps: nobody can tell from outside whether that ends."""
    holder, source = HOLDERS[name]
    found = run_script(source)
    assert [(one.kind, holder in (one.holder or "")) for one in found] == [("growing", True)], found
    latest = 40 if name == "all_epochs" else LATEST  # a container has several items
    assert growth.GROWING <= found[0].steps <= latest
    assert found[0].made_at is not None
    assert "cannot tell whether that ends" in sentence(found[0], "/")
    if name == "longer_tensor":  # 40 floats a step
        assert found[0].bytes - found[0].details["first_bytes"] == found[0].steps * 40 * 4
        assert "become longer in 20 steps" in sentence(found[0], "/")


@pytest.mark.parametrize("name", ["list_of_an_instance", "longer_tensor"])
def test_growth_that_will_not_fit_is_an_alarm(name: str, run_script: RunScript) -> None:
    """It takes more than a tenth of the memory after 20 steps, and 1,000 are to come."""
    holder, source = HOLDERS[name]
    (found,) = run_script(source, free=20_000)
    assert (found.kind, holder in (found.holder or "")) == ("growth", True)
    assert "160 bytes a step, which does not fit into 20 KiB for the 97" in sentence(found, "/")


def test_a_notice_becomes_an_alarm(run_script: RunScript) -> None:
    """Once what it holds is a considerable share of the memory."""
    source = HOLDERS["list_of_an_instance"][1].replace("32", "70")
    assert [one.kind for one in run_script(source, free=60_000)] == ["growing", "growth"]
