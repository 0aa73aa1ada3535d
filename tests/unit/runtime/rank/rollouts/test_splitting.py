"""A micro-batch in pieces has the loss, the gradient and the metrics of the whole one, for every loss that is
split.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_trainers import tiny_trainer

from grpo_run.runtime.memory.facts import EXACT_GRPO_LOSSES, INEXACT_GRPO_LOSSES
from grpo_run.runtime.rank.rollouts.forecast_splitting import joined, split_loss, split_rows

ROWS, PROMPT, COMPLETION = 5, 4, 6
"""An odd number of rows, so that pieces differ in size."""


def make_trainer(kind: str, folder: Path) -> Any:
    """A real trainer on a tiny model in double precision."""
    made = tiny_trainer(
        kind, folder, per_device_train_batch_size=ROWS, gradient_accumulation_steps=2, num_generations=ROWS,
        max_completion_length=COMPLETION,
    )  # fmt: skip
    made.current_gradient_accumulation_steps = 2
    made.model.double().train()
    return made


@pytest.fixture(scope="module")
def grpo(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_trainer("GRPO", tmp_path_factory.mktemp("grpo"))


@pytest.fixture(scope="module")
def rloo(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_trainer("RLOO", tmp_path_factory.mktemp("rloo"))


def inputs(algorithm: str) -> dict[str, Any]:
    """A micro-batch whose completions have different lengths, off policy."""
    generator = torch.Generator().manual_seed(5)
    lengths = torch.tensor([6, 2, 5, 1, 4])
    mask = (torch.arange(COMPLETION)[None] < lengths[:, None]).long()
    made: dict[str, Any] = {
        "prompt_ids": torch.randint(3, 30, (ROWS, PROMPT), generator=generator),
        "prompt_mask": torch.ones(ROWS, PROMPT, dtype=torch.long),
        "completion_ids": torch.randint(3, 30, (ROWS, COMPLETION), generator=generator),
        "completion_mask": mask,
        "advantages": torch.tensor([1.0, -0.5, 0.25, 2.0, -1.5], dtype=torch.double),
    }
    logps = -3.6 + 0.3 * torch.rand(ROWS, COMPLETION, generator=generator, dtype=torch.double)
    if algorithm == "rloo":
        return {**made, "old_logps": (logps * mask).sum(1)}
    return {
        **made, "num_items_in_batch": torch.tensor(37), "old_per_token_logps": logps,
        "ref_per_token_logps": logps - 0.1,
    }  # fmt: skip


def gradient_of(
    trainer: Any, algorithm: str, pieces: int
) -> tuple[float, dict[str, torch.Tensor], dict[str, Any]]:
    """Return the loss that `training_step` would log, the gradient, and what was logged."""
    trainer.model.zero_grad()
    trainer._metrics["train"].clear()
    if pieces == 1:
        loss = trainer.compute_loss(trainer.model, inputs(algorithm))
    else:
        loss = split_loss(
            trainer, trainer.compute_loss, trainer.model, inputs(algorithm), ROWS, pieces,
            sums=getattr(trainer, "loss_type", None) in ("dapo", "cispo", "vespo"),
            scaled=trainer.loss_is_scaled_for_ga, keywords={},
        )  # fmt: skip
    if not trainer.loss_is_scaled_for_ga:
        loss = loss / trainer.current_gradient_accumulation_steps
    trainer.accelerator.backward(loss)
    gradient = {
        name: one.grad.clone() for name, one in trainer.model.named_parameters() if one.grad is not None
    }
    logged = {name: list(values) for name, values in trainer._metrics["train"].items()}
    return float(loss.detach()), gradient, logged


def distance(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Relative to the norm of the gradient."""
    assert found.keys() == expected.keys()
    apart = sum(float((found[name] - expected[name]).square().sum()) for name in expected)
    return float((apart / sum(float(one.square().sum()) for one in expected.values())) ** 0.5)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("beta", [0.0, 0.3])
@pytest.mark.parametrize("loss_type", sorted(EXACT_GRPO_LOSSES))
def test_pieces_of_any_number_have_the_gradient_of_the_whole(
    grpo: Any, loss_type: str, beta: float, level: str
) -> None:
    grpo.loss_type, grpo.beta, grpo.importance_sampling_level = loss_type, beta, level
    loss, gradient, logged = gradient_of(grpo, "grpo", 1)
    for pieces in (2, 3, ROWS):
        split, parts, entries = gradient_of(grpo, "grpo", pieces)
        assert split == pytest.approx(loss, rel=1e-6, abs=1e-9)
        assert distance(parts, gradient) < 1e-6
        assert entries.keys() == logged.keys()
        assert {len(values) for values in entries.values()} == {1}
        for name in entries:
            if name.endswith(("_min", "_max")):
                assert entries[name] == pytest.approx(logged[name])


def test_a_loss_that_is_refused_has_another_gradient_in_pieces(grpo: Any) -> None:
    """Otherwise it would be refused for nothing."""
    (refused,) = INEXACT_GRPO_LOSSES
    grpo.loss_type, grpo.beta, grpo.importance_sampling_level = refused, 0.0, "token"
    _, gradient, _ = gradient_of(grpo, "grpo", 1)
    assert distance(gradient_of(grpo, "grpo", 2)[1], gradient) > 1e-3


def test_rloo_divides_by_the_accumulated_micro_batches_once(rloo: Any) -> None:
    """The caller of `compute_loss` does it for the last piece; the others were differentiated before."""
    loss, gradient, _ = gradient_of(rloo, "rloo", 1)
    for pieces in (2, 3, ROWS):
        split, parts, _ = gradient_of(rloo, "rloo", pieces)
        assert split == pytest.approx(loss, rel=1e-6, abs=1e-9)
        assert distance(parts, gradient) < 1e-6


def test_rows_are_divided_and_numbers_of_the_rollout_stay() -> None:
    batch = {**inputs("grpo"), "names": list("abcde"), "nothing": None}
    parts = split_rows(batch, ROWS, 2)
    assert [share for _, share in parts] == [3 / 5, 2 / 5]
    for name, value in batch.items():
        pieces = [part[name] for part, _ in parts]
        if name == "num_items_in_batch":
            assert pieces == [value, value]
        elif name == "nothing":
            assert pieces == [None, None]
        elif name == "names":
            assert pieces == [list("abc"), list("de")]
        else:
            assert torch.equal(torch.cat(pieces), value)


def test_a_metric_of_pieces_is_what_its_name_says() -> None:
    shares = [0.75, 0.25]
    assert joined("entropy", [1.0, 2.0], shares) == 1.25
    assert joined("clip_ratio/low_min", [1.0, 2.0], shares) == 1.0
    assert joined("clip_ratio/high_max", [1.0, 2.0], shares) == 2.0
    assert joined("kl", [math.nan, 2.0], shares) == 2.0
    assert math.isnan(joined("kl", [math.nan, math.nan], shares))
