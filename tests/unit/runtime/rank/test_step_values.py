"""What is read from a trainer: raw values, of this step only, and nothing that a gradient scaler handles."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_run.runtime.rank.learning import StepReader, read_steps


class Trainer:
    """The part of a GRPO trainer that is read."""

    def __init__(self) -> None:
        self.loss: Any = torch.tensor(0.5)
        self.norm: Any = torch.tensor(1.0)
        self.accelerator = SimpleNamespace(
            clip_grad_norm_=lambda *arguments: self.norm,
            optimizer_step_was_skipped=False,
            mixed_precision="no",
        )
        self._metrics: dict[str, dict[str, list[float]]] = {
            "train": defaultdict(list), "eval": defaultdict(list),
        }  # fmt: skip

    def training_step(self, *arguments: Any) -> Any:
        """Return the loss."""
        return self.loss


def finite(trainer: Trainer) -> bool:
    """Whether a step of the trainer counts as finite."""
    reader = StepReader(trainer)
    with read_steps(trainer, reader):
        reader.begin_step()
        assert trainer.training_step() is trainer.loss
        assert trainer.accelerator.clip_grad_norm_([], 1.0) is trainer.norm
        return reader.take().finite


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("loss", "norm", "expected"),
    [
        (torch.tensor(0.5), torch.tensor(1.0), True),
        (torch.tensor(NAN), torch.tensor(1.0), False),
        (torch.tensor(INF), torch.tensor(1.0), False),
        (torch.tensor(0.5), torch.tensor(NAN), False),
        (torch.tensor(0.5), torch.tensor(INF), False),
        (torch.tensor(0.5), torch.tensor(-1.0), False),
        (torch.tensor(0.5), None, True),
        (torch.tensor(0.5), 2.5, True),
        (torch.tensor(0.5), NAN, False),
        (torch.tensor(0.5), -1.0, False),
        (torch.tensor([0.5, NAN]), None, False),
        (torch.tensor([0.5, 0.2]), None, True),
        (0.5, None, True),
        (torch.tensor(2), None, True),
    ],
)
def test_loss_and_gradient_are_read_raw(loss: Any, norm: Any, expected: bool) -> None:
    """transformers' log shows 0 for a loss that is NaN. Losses have any shape; DeepSpeed returns the norm as
    a number, and -1 for one that is not finite.
    """
    trainer = Trainer()
    trainer.loss, trainer.norm = loss, norm
    assert finite(trainer) is expected


def test_a_step_that_a_gradient_scaler_skips_is_healthy() -> None:
    """It looks for its scale; the weights have not changed."""
    trainer = Trainer()
    trainer.norm = torch.tensor(float("inf"))
    trainer.accelerator.optimizer_step_was_skipped = True
    trainer.accelerator.mixed_precision = "fp16"
    assert finite(trainer)
    trainer.accelerator.mixed_precision = "bf16"
    assert not finite(trainer)  # DeepSpeed skips it without a scale to look for


def test_a_bad_step_does_not_spoil_the_next_one() -> None:
    """Each step counts for itself."""
    trainer = Trainer()
    reader = StepReader(trainer)
    with read_steps(trainer, reader):
        trainer.loss = torch.tensor(float("nan"))
        trainer.training_step()
        assert not reader.take().finite
        trainer.loss = torch.tensor(0.1)
        trainer.training_step()
        assert reader.take().finite


def test_metrics_are_those_of_this_step() -> None:
    """The table collects them over several steps, and is emptied when they are logged."""
    trainer = Trainer()
    reader, table = StepReader(trainer), trainer._metrics["train"]
    table["reward"] += [9.0]
    reader.begin_step()
    table["reward"] += [0.5]
    table["entropy"] += [1.0, 2.0, float("nan")]
    table["completions/clipped_ratio"] += [0.25]
    values = reader.take()
    assert (values.reward, values.entropy, values.capped, values.kl) == (0.5, 1.5, 0.25, None)
    table.clear()
    reader.begin_step()
    table["reward"] += [0.75]
    assert reader.take().reward == 0.75
    reader.begin_step()
    assert reader.take().reward is None  # it trains on the same rollout again
    del trainer._metrics  # a trainer of another class
    reader.begin_step()
    assert reader.take().reward is None
