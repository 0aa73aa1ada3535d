"""What a census finds, and that it keeps nothing."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch

from grpo_run.runtime.rank.memory_trace._census import Ledger, group_of, take_census, tensor_types
from grpo_run.runtime.rank.memory_trace._sites import SiteRecorder


def saved_sizes(root: torch.Tensor) -> set[int]:
    """Sizes of what the graph of a tensor has saved, by a census."""
    return {
        saved.numel()
        for holder, kept in take_census(tensor_types(torch)).graphs
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
    """The ledger and a dropped census hold nothing, with automatic collection off as well."""
    gc.collect()
    gc.disable()
    try:
        ledger = Ledger()
        tensor = torch.zeros(647)
        key, freed = tensor.untyped_storage()._cdata, weakref.ref(tensor)
        ledger.observe(1, take_census(tensor_types(torch)), {})
        assert [one.shape for one in ledger.of([key])] == [(647,)]
        del tensor
        assert freed() is None
        assert ledger.of([key]) == []
    finally:
        gc.enable()


def test_an_entry_has_the_step_in_which_it_was_first_seen() -> None:
    """Later censuses do not change it."""
    ledger = Ledger()
    tensor = torch.zeros(653)
    for step in (3, 4, 5):
        ledger.observe(step, take_census(tensor_types(torch)), {})
    assert [one.born for one in ledger.of([tensor.untyped_storage()._cdata])] == [3]


def test_the_line_that_makes_a_tensor_is_recorded() -> None:
    """Also in a backward pass, and for a view's storage once; not for other groups, nor afterwards."""
    weight = torch.zeros(659, requires_grad=True)
    recorder = SiteRecorder({group_of(weight)})
    assert recorder.begin()
    made = weight.detach() + 1
    other = torch.zeros(2, 659)
    (weight * 2).sum().backward()
    assert recorder.end()
    later = weight.detach() + 1
    assert weight.grad is not None
    sites = recorder.sites
    assert sites[made.untyped_storage()._cdata].file == __file__
    assert (
        sites[made.untyped_storage()._cdata].function
        == test_the_line_that_makes_a_tensor_is_recorded.__name__
    )
    assert sites[weight.grad.untyped_storage()._cdata].file == __file__
    assert other.untyped_storage()._cdata not in sites
    assert later.untyped_storage()._cdata not in sites
    key = made.untyped_storage()._cdata
    del made
    assert key not in sites


def test_a_mode_of_the_script_is_not_disturbed() -> None:
    """Nothing is recorded inside one, and ours does not end before one that was entered later."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False):
        assert not SiteRecorder(()).begin()
    recorder = SiteRecorder(())
    assert recorder.begin()
    with FlopCounterMode(display=False) as counter:
        assert not recorder.end()
        torch.ones(4, 4) @ torch.ones(4, 4)
    assert counter.get_total_flops() == 128
    assert recorder.end()


def test_everything_that_a_graph_has_saved_belongs_to_it_in_every_census() -> None:
    """The first makes Python objects of saved views and of their bases, with graphs of their own."""
    layers = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.SiLU(), torch.nn.Linear(16, 16))
    hidden = torch.ones(2, 5, 16)
    for layer in layers:
        hidden = layer(hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1))
    result = hidden.sum()
    del hidden
    sizes = []
    for _ in range(3):
        census = take_census(tensor_types(torch))
        assert [holder for holder, _ in census.graphs] == [result]
        sizes.append(len(census.graphs[0][1]))
        del census
    assert sizes[0] == sizes[1] == sizes[2] > 5
