"""The switches change where memory goes, not the update: log-probabilities are TRL's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from grpo_run.trainers.rloo import __main__ as script
from grpo_run.trainers.rloo._generation import SwitchedGeneration, joined, reduced
from grpo_run.trainers.rloo._live_bytes import LiveBytes
from grpo_run.trainers.rloo.switches import METHODS


def words(tmp_path: Path, name: str) -> list[str]:
    """Arguments of a run that replays what the first one has recorded."""
    return [
        "--k=3", "--vocabulary=300", "--completion-tokens=4", "--steps=2",
        f"--completions={tmp_path / 'completions'}", f"--output-dir={tmp_path / name}",
    ]  # fmt: skip


def trained(tmp_path: Path, name: str, *more: str) -> dict[str, torch.Tensor]:
    """Train, and return the weights."""
    script.main([*words(tmp_path, name), *more])
    weights: dict[str, torch.Tensor] = load_file(tmp_path / name / "model.safetensors")
    return weights


def test_the_same_completions_give_bitwise_the_same_update_by_every_method(tmp_path: Path) -> None:
    first = trained(tmp_path, "basic", "--method=basic")
    for method in set(METHODS) - {"basic"}:
        other = trained(tmp_path, method, f"--method={method}")
        assert all(torch.equal(first[name], other[name]) for name in first), method
    start = script.tiny_qwen3(300, script.tiny_tokenizer()).state_dict()
    assert any(not torch.equal(first[name], start[name]) for name in first)


def test_the_heads_differ_by_rounding_only(tmp_path: Path) -> None:
    full = trained(tmp_path, "full", "--scores=dropped")
    fused = trained(tmp_path, "fused", "--scores=dropped", "--head=fused")
    for name, weight in full.items():
        torch.testing.assert_close(fused[name], weight, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("expansion", ["interleaved", "in_turn", "sampler", "text"])
def test_generation_starts_from_the_same_rows_in_the_order_of_trl(tmp_path: Path, expansion: str) -> None:
    """With a `generate` that only repeats its input, each completion is the prompt of its row."""
    options = script.build_parser().parse_args([*words(tmp_path, "x"), "--expansion", expansion])
    trainer = script.build_trainer(options)
    seen: list[int] = []

    def echo(input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
        seen.append(len(input_ids))
        return torch.cat([input_ids, input_ids], 1)

    trainer.model.generate = echo
    switches = script.switches_of(script.build_parser().parse_args(
        [*words(tmp_path, "x"), "--expansion", expansion, "--scores", "dropped"]
    ))  # fmt: skip
    generation = SwitchedGeneration(trainer, switches, LiveBytes())
    prompts = trainer.processing_class(text=["ab", "cd"])["input_ids"]
    rows = [row for row in prompts for _ in range(3)]
    assert generation._turn(rows, None, {}) == rows
    assert seen == [2, 2, 2]


def test_reduced_scores_are_the_log_probabilities_of_the_tokens() -> None:
    scores = torch.randn(3, 4, 7)
    tokens = torch.randint(7, (4, 3))
    found = reduced(list(scores), tokens)
    expected = scores.log_softmax(-1).transpose(0, 1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(found, expected)


def test_parts_of_different_lengths_are_padded_and_joined() -> None:
    found = joined([torch.ones(1, 2), torch.ones(2, 3)], 0.0)
    assert found.tolist() == [[1, 1, 0], [1, 1, 1], [1, 1, 1]]
    assert joined([torch.ones(1, 1, 5), torch.ones(1, 2, 5)], 0.0).shape == (2, 2, 5)
