"""Graphs that a step keeps and drops: a generation without `no_grad` is found, and what a backward pass uses is not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from grpo_run.runtime.rank.memory_trace.dropped_graphs import (
    AT_ONCE,
    STEPS,
    CallGraph,
    Dropped,
    DroppedGraphs,
    most_at_once,
)

CALLS = AT_ONCE + 2
Step = Callable[[Callable[[], torch.Tensor]], object]


def run(step: Step, *, steps: int = STEPS + 6) -> list[Dropped]:
    """What is found in the steps of a script."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64))
    observed = DroppedGraphs()
    found = []
    kept = []

    def call() -> torch.Tensor:
        output: torch.Tensor = model(torch.ones(4, 64))
        observed.called(model, {"logits": output})
        return output

    for number in range(steps):
        kept = [step(call)]  # a local variable, until the next step
        one = observed.step_ended(number)
        if one is not None:
            found.append(one)
    assert kept
    return found


def generate(call: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Sample with the graph of each token."""
    return torch.cat([call().log_softmax(-1)[:, :1] for _ in range(CALLS)])


def test_a_generation_that_keeps_its_graphs_is_found() -> None:
    """With how many were there at once, and their size."""
    first = run(generate)[0]
    assert (first.calls, first.steps) == (CALLS, STEPS)
    assert first.bytes == CALLS * 2 * 4 * 64 * 4
    assert first.site is not None
    assert first.site.file == __file__


def without_graph(call: Callable[[], torch.Tensor]) -> object:
    with torch.no_grad():
        return generate(call)


def dropped_at_once(call: Callable[[], torch.Tensor]) -> object:
    for _ in range(CALLS):
        call().argmax()
    return None


def used_together(call: Callable[[], torch.Tensor]) -> object:
    generate(call).sum().backward()  # type: ignore[no-untyped-call]
    return None


def used_after_a_gradient(call: Callable[[], torch.Tensor]) -> object:
    outputs = generate(call)
    torch.autograd.grad(outputs.sum(), outputs)
    outputs.sum().backward()  # type: ignore[no-untyped-call]
    return None


def a_few(call: Callable[[], torch.Tensor]) -> object:
    return [call() for _ in range(AT_ONCE - 1)]


@pytest.mark.parametrize(
    "step", [without_graph, dropped_at_once, used_together, used_after_a_gradient, a_few]
)
def test_nothing_is_found_in_healthy_steps(step: Step) -> None:
    """Graphs that are used, dropped one by one, or few."""
    assert run(step) == []


def test_a_backward_pass_from_an_activation_within_the_model_is_seen() -> None:
    """It does not run through the output."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64))
    inside: list[torch.Tensor] = []
    model[1].register_forward_hook(lambda layer, given, output: inside.append(output))
    observed = DroppedGraphs()
    for number in range(STEPS + 6):
        kept = []
        for _ in range(CALLS):
            kept.append(model(torch.ones(4, 64)))
            observed.called(model, kept[-1])
        torch.stack(inside).sum().backward()  # type: ignore[no-untyped-call]
        inside.clear()
        assert observed.step_ended(number) is None


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_model_with_gradient_checkpointing_is_observed(reentrant: bool) -> None:
    """It saves objects of its own instead of tensors."""
    from torch.utils.checkpoint import checkpoint

    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64))
    observed = DroppedGraphs()
    for number in range(STEPS):
        given = torch.ones(4, 64, requires_grad=True)
        output = checkpoint(model, given, use_reentrant=reentrant)
        observed.called(model, output)
        output.sum().backward()  # type: ignore[no-untyped-call]
        assert observed.step_ended(number) is None


def test_graphs_that_are_kept_from_step_to_step_are_no_dropped_ones() -> None:
    """They are a finding of their own."""
    kept: list[object] = []
    assert run(lambda call: kept.append(generate(call))) == []


def test_graphs_are_counted_where_most_of_them_overlap() -> None:
    """Used ones are left out."""
    spans = [(0, 2), (1, 2), (2, 2), (3, 5), (4, 5)]
    graphs = [CallGraph(number=first, last=last, bytes=1) for first, last in spans]
    assert most_at_once(graphs) == graphs[:3]
    graphs[1].used = True
    assert len(most_at_once(graphs)) == 2
    assert most_at_once([]) == []
