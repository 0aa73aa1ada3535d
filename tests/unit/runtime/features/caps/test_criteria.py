"""Caps end completions inside transformers' own `generate`, each by itself."""

from __future__ import annotations

from typing import Any

import torch
from support.planted import cycle, planted
from transformers import StoppingCriteriaList

from grpo_run.runtime.features.caps._criteria import CapCriteria, Repetition
from grpo_run.runtime.features.caps._rollout import Cut, EndReason

PAD, EOS = 0, 1
PROMPT = 4


def generate(
    model: Any, prompts: list[list[int]], *, window: int | None = None, seconds: int = 10**9, **settings: Any
) -> tuple[list[list[int]], list[Cut | None], CapCriteria]:
    """Generate greedily, with a clock that goes one second a token, and return completions and cuts."""
    inputs = torch.tensor(prompts)
    criteria = CapCriteria(
        inputs.shape[1],
        {EOS},
        repetition=None if window is None else Repetition(inputs.shape[1], window=window),
        out_of_time=lambda steps: steps >= seconds,
    )
    found = model.generate(
        input_ids=inputs,
        attention_mask=torch.ones_like(inputs),
        do_sample=False,
        stopping_criteria=StoppingCriteriaList([criteria]),
        **{"max_new_tokens": 800, **settings},
    )
    completions = found[:, inputs.shape[1] :].tolist()
    return completions, criteria.cuts([len(tokens) for tokens in completions]), criteria


def test_a_finished_completion_is_not_taken_for_a_loop() -> None:
    """It is filled up with padding, the same token again and again, while the other goes on."""
    successors = cycle([2], 600)
    for token in range(10, 410):
        successors[token] = token + 1
    successors[5], successors[6] = 6, EOS
    for pad in (PAD, EOS):
        model = planted(successors, pad=pad, eos=EOS)
        _, cuts, _ = generate(model, [[10] * PROMPT, [5] * PROMPT], window=16, max_new_tokens=120)
        assert cuts == [None, None]


def test_a_loop_of_the_padding_token_is_a_loop() -> None:
    """A model may be stuck there like anywhere else."""
    model = planted(cycle([PAD], 16), pad=PAD, eos=EOS)
    _, cuts, _ = generate(model, [[5] * PROMPT], window=16)
    assert cuts[0] is not None
    assert cuts[0].reason is EndReason.repetition


def test_a_deadline_ends_all_that_have_not_ended() -> None:
    """With the token after which it passed; completions that had ended keep their own reason."""
    successors = cycle([2, 3], 600)
    successors[5], successors[6] = 6, EOS
    for token in range(10, 410):
        successors[token] = token + 1
    model = planted(successors, pad=PAD, eos=EOS)
    completions, cuts, _ = generate(
        model, [[10] * PROMPT, [5] * PROMPT, [2] * PROMPT], window=16, seconds=100
    )
    assert cuts[0] == Cut(length=100, reason=EndReason.deadline)
    assert cuts[1] is None
    assert cuts[2] is not None
    assert cuts[2].reason is EndReason.repetition
    assert {len(tokens) for tokens in completions} == {100}


def test_a_deadline_between_two_blocks_sees_the_end_of_a_completion() -> None:
    """Its end-of-sequence token came after the last block that was compared."""
    successors = cycle([2, 3], 600)
    for token in range(10, 35):
        successors[token] = token + 1
    successors[35] = EOS
    for token in range(100, 500):
        successors[token] = token + 1
    model = planted(successors, pad=PAD, eos=EOS)
    _, cuts, _ = generate(model, [[10] * PROMPT, [100] * PROMPT], window=64, seconds=28)
    assert cuts == [None, Cut(length=28, reason=EndReason.deadline)]


def test_cuts_beyond_the_last_token_do_not_count() -> None:
    """Generation that looks one step ahead asks once more after the last token that it keeps."""
    criteria = CapCriteria(1, {EOS}, repetition=None, out_of_time=lambda steps: steps >= 3)
    for length in (2, 3, 4):
        criteria(torch.full((2, length), 7), None)
    assert criteria.cuts([3, 2]) == [Cut(length=3, reason=EndReason.deadline), None]
