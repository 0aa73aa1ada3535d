"""What a census finds, and that it keeps nothing."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch

from grpo_run.runtime.features.memory_trace._census import Ledger, take_census, tensor_types
from grpo_run.runtime.features.memory_trace._sites import SiteRecorder


def saved_sizes(root: torch.Tensor) -> set[int]:
    """Sizes of what the graph of a tensor has saved, by a census."""
    return {
        saved.numel()
        for holder, kept in take_census(tensor_types(torch)).graphs.values()
        if holder is root
        for saved in kept.values()
    }


def test_what_only_autograd_holds_is_found() -> None:
    """`gc` cannot see it."""
    weight = torch.zeros(641, requires_grad=True)
    result = (weight * 2).exp().sum()
    assert 641 in saved_sizes(result)
    assert 641 in saved_sizes(result)  # a census has made Python objects of it
    result.backward()
    assert saved_sizes(result) == set()


def test_a_census_runs_no_hook_of_saved_tensors() -> None:
    """They may recompute a part of the model."""
    unpacked: list[int] = []
    hooks: Any = torch.autograd.graph.saved_tensors_hooks
    with hooks(lambda tensor: tensor.shape, unpacked.append):
        result = torch.zeros(643, requires_grad=True).exp()
    assert saved_sizes(result) == set()
    assert unpacked == []


def test_entries_go_with_their_storage() -> None:
    """The ledger and a dropped census hold nothing, with automatic collection off as well. An entry has the
    step in which it was first seen; the first steps are left out.
    """
    gc.collect()
    gc.disable()
    try:
        ledger = Ledger()

        def observe(step: int) -> list[tuple[int, tuple[int, ...]]]:
            ledger.observe(step, take_census(tensor_types(torch)), lambda key: None)
            return [(one.born, one.shape) for one in ledger.later() if one.shape in ((641,), (647,))]

        early = torch.zeros(641)
        assert observe(1) == observe(2) == []
        tensor = torch.zeros(647)
        freed = weakref.ref(tensor)
        assert observe(3) == observe(4) == [(3, (647,))]
        del tensor
        assert freed() is None
        assert observe(5) == []
        assert early is not None
    finally:
        gc.enable()


def test_the_line_that_makes_a_tensor_is_recorded() -> None:
    """Also in a backward pass, and for a view's storage once; not for what is made afterwards."""
    weight = torch.zeros(659, requires_grad=True)
    recorder = SiteRecorder(lambda look, *arguments: look(*arguments))
    assert recorder.begin()
    made = weight.detach() + 1
    (weight * 2).sum().backward()
    assert recorder.end()
    later = weight.detach() + 1
    assert weight.grad is not None
    keys = [one.untyped_storage()._cdata for one in (made, weight.grad, later, weight)]
    name = test_the_line_that_makes_a_tensor_is_recorded.__name__
    found = [recorder.site_of(key) for key in keys]
    assert [(one.file, one.function) if one is not None else None for one in found] == [
        (__file__, name), (__file__, name), None, None,
    ]  # fmt: skip
    del made
    assert recorder.site_of(keys[0]) is None


def test_a_mode_of_the_script_is_not_disturbed() -> None:
    """Nothing is recorded inside one, and ours does not end before one that was entered later."""
    from torch.utils.flop_counter import FlopCounterMode

    recorder = SiteRecorder(lambda look, *arguments: look(*arguments))
    with FlopCounterMode(display=False):
        assert not recorder.begin()
    assert recorder.begin()
    with FlopCounterMode(display=False) as counter:
        assert not recorder.end()
        torch.ones(4, 4) @ torch.ones(4, 4)
    assert counter.get_total_flops() == 128
    assert recorder.end()


def test_everything_that_a_graph_has_saved_belongs_to_it_in_every_census() -> None:
    """The first makes Python objects of saved views and of their bases, with graphs of their own."""
    # Earlier tests may have left graphs: held here, so that no later address is taken for one of theirs.
    earlier = [holder for holder, _ in take_census(tensor_types(torch)).graphs.values()]
    known = {id(holder) for holder in earlier}
    layers = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.SiLU(), torch.nn.Linear(16, 16))
    hidden = torch.ones(2, 5, 16)
    for layer in layers:
        hidden = layer(hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1))
    result = hidden.sum()
    del hidden
    sizes = []
    for _ in range(3):
        found = [one for one in take_census(tensor_types(torch)).graphs.values() if id(one[0]) not in known]
        assert [holder is result for holder, _ in found] == [True]
        sizes.append(len(found[0][1]))
        del found
    assert sizes[0] == sizes[1] == sizes[2] > 5
