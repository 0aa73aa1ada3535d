"""What a rank holds of a call is named, and every flipped bit changes a digest."""

from __future__ import annotations

import torch

from grpo_run.runtime.rank.tensor_digests import combined, digest_of_weights, digests, tensors_of_rank


def trained() -> tuple[torch.nn.Linear, torch.optim.AdamW]:
    """Return a module, and an optimizer that has taken a step."""
    module = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(3)).sum().backward()
    optimizer.step()
    return module, optimizer


def test_parameters_come_first_and_moments_have_their_names() -> None:
    """A second module has a prefix."""
    module, optimizer = trained()
    names = [name for name, _ in tensors_of_rank([module, torch.nn.Linear(1, 1, bias=False)], [optimizer])]
    assert names == [
        "weight", "bias", "1.weight", "step of weight", "exp_avg of weight", "exp_avg_sq of weight",
        "step of bias", "exp_avg of bias", "exp_avg_sq of bias",
    ]  # fmt: skip


def test_state_by_flat_parts_is_named_by_its_number() -> None:
    """As ZeRO keeps it."""
    module, _ = trained()
    flat = torch.zeros(8, requires_grad=True)
    optimizer = torch.optim.AdamW([flat])
    flat.sum().backward()
    optimizer.step()
    assert "exp_avg of part 0" in dict(tensors_of_rank([module], [optimizer]))


def test_what_has_no_tensors_is_left_out() -> None:
    """Such as a parameter that is on no device, or another library's optimizer."""
    assert list(tensors_of_rank([torch.nn.Linear(2, 2, device="meta")], [object()])) == []


def test_a_flipped_bit_changes_the_digest_of_its_tensor_only() -> None:
    """Of any type."""
    tensors = [
        torch.ones(5, dtype=kind) for kind in (torch.float32, torch.bfloat16, torch.int64, torch.uint8)
    ]
    before = digests(tensors)
    for number, tensor in enumerate(tensors):
        tensor.view(torch.uint8)[3] ^= 16
        after = digests(tensors)
        assert [one for one in range(4) if before[one] != after[one]] == [number]
        before = after


def test_digests_of_one_model_are_one_number() -> None:
    """Which fits into a vote, and depends on the order of the tensors."""
    values = digests([torch.ones(3), torch.zeros(0), torch.full((2,), -1.0)])
    assert 0 <= combined(values) < 1 << 63
    assert combined(values) != combined(values[::-1])
    assert combined([]) == combined([])


def test_weights_of_models_are_one_text() -> None:
    """A buffer counts, and a rank that holds none has no text."""
    module = torch.nn.BatchNorm1d(3)
    before = digest_of_weights([module])
    module(torch.ones(2, 3))
    assert before != digest_of_weights([module])
    assert digest_of_weights([torch.nn.ParameterList([torch.empty(0)])]) == digest_of_weights([]) == ""
