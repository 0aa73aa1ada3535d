"""Which calls of a trainer are forecast, and with how many rows it scores; evaluation and unknown calls stay
as they are.
"""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_run.runtime.rank.rollouts.forecast import GeneratedRollout
from grpo_run.runtime.rank.rollouts.forecast_splitting import TrainerPasses
from grpo_run.runtime.upstream.patches import wrapped_methods

TOKENS = torch.ones(8, 10)


class Recorded:
    """Forecasts that decide what the test says, and record what they are told."""

    def __init__(self, pieces: int) -> None:
        self.pieces: int | None = None
        self.decides = pieces
        self.calls: list[Any] = []

    def begin(self, rollout: GeneratedRollout) -> None:
        self.calls.append(("begin", rollout.number, rollout.length, rollout.steps))
        self.pieces = self.decides

    def passed(self, kind: str, size: tuple[int, int], *, beside_gradients: bool = False) -> None:
        self.calls.append((kind, size, beside_gradients))

    def failed(self) -> None:
        self.calls.append("failed")

    def measuring(self) -> Any:
        return nullcontext()


class Trainer:
    """The part of a trainer that is wrapped."""

    def __init__(self) -> None:
        self.model = SimpleNamespace(training=True)
        self.args = SimpleNamespace(
            steps_per_generation=4, gradient_accumulation_steps=2, per_device_train_batch_size=8
        )
        self.num_iterations, self.current_gradient_accumulation_steps = 1, 2
        self.state, self._step, self.pad_to_multiple_of = SimpleNamespace(global_step=6), 12, None
        self.loss_type, self.loss_is_scaled_for_ga = "grpo", True
        self.error: Exception | None = None

    def _generate(self, prompts: Any) -> Any:
        return [[1] * 4] * 8, [[1] * 6] * 8

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Any,
        attention_mask: Any,
        logits_to_keep: Any,
        batch_size: Any = None,
        **_: Any,
    ) -> Any:
        return batch_size

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        if self.error is not None:
            raise self.error
        return inputs


def attached(pieces: int) -> tuple[Any, Recorded, list[str]]:
    """A trainer that is forecast."""
    trainer, recorded, votes = Trainer(), Recorded(pieces), []
    made: Any = trainer
    passes = TrainerPasses(made, recorded, SimpleNamespace(collect=lambda: votes.append("collected")))  # type: ignore[arg-type]
    around = {
        "_generate": [passes.forecast_rollout],
        "compute_loss": [passes.train_in_pieces],
        "_get_per_token_logps_and_entropies": [passes.score_in_pieces],
    }
    made.hooks = ExitStack()
    made.hooks.enter_context(wrapped_methods(made, around))
    return made, recorded, votes


def test_ranks_decide_after_the_vote_when_a_rollout_has_been_generated() -> None:
    trainer, recorded, votes = attached(2)
    assert trainer._generate(["a"])[1] == [[1] * 6] * 8
    assert votes == ["collected"]
    assert recorded.calls == [("begin", 12, 10, (7, 8))]


@pytest.mark.parametrize(("pieces", "rows"), [(1, 8), (2, 4), (3, 3), (8, 1)])
def test_scoring_takes_as_many_rows_as_a_piece_has(pieces: int, rows: int) -> None:
    """GRPO gives `batch_size` by name and RLOO by place; a loss gives none."""
    trainer, recorded, _ = attached(pieces)
    trainer._generate([])
    assert trainer._get_per_token_logps_and_entropies(None, TOKENS, None, 6, batch_size=8) == rows
    assert trainer._get_per_token_logps_and_entropies(None, TOKENS, None, 6, 8) == rows
    assert trainer._get_per_token_logps_and_entropies(None, TOKENS, None, 6) is None
    assert recorded.calls[1:] == [("score", (rows, 10), False)] * 2


def test_evaluation_stays_as_it_is() -> None:
    trainer, recorded, votes = attached(2)
    trainer._generate([])
    trainer.model.training = False
    batch = {"prompt_ids": torch.ones(8, 4), "completion_ids": torch.ones(8, 6)}
    assert trainer._get_per_token_logps_and_entropies(None, TOKENS, None, 6, batch_size=8) == 8
    assert trainer.compute_loss(None, batch) is batch
    trainer._generate([])
    assert (len(recorded.calls), votes) == (1, ["collected"])


def test_a_batch_of_another_form_stays_as_it_is() -> None:
    """What a subclass or a direct call passes."""
    trainer, recorded, _ = attached(2)
    for batch in ({"input_ids": torch.ones(8, 4)}, {}):
        assert trainer.compute_loss(None, batch) is batch
    batch = {"prompt_ids": torch.ones(8, 4), "completion_ids": torch.ones(8, 6)}
    with torch.no_grad():
        assert trainer.compute_loss(None, batch) is batch
    assert trainer.compute_loss(None, batch, False) is batch
    assert not recorded.calls


def test_inside_a_rollout_that_was_restored_ranks_decide_at_the_first_loss() -> None:
    """For the steps that are left of it."""
    trainer, recorded, votes = attached(1)
    trainer._step = 14
    batch = {"prompt_ids": torch.ones(8, 4), "completion_ids": torch.ones(8, 6)}
    trainer.compute_loss(None, batch)
    trainer.compute_loss(None, batch)
    assert votes == ["collected"]
    assert recorded.calls == [("begin", 12, 10, (7, 7)), *[("pass", (8, 10), True)] * 2]


def test_a_pass_that_raises_is_not_measured() -> None:
    """Its peak is what fitted, not what it needs."""
    trainer, recorded, _ = attached(1)
    trainer._generate([])
    trainer.error = torch.OutOfMemoryError("CUDA out of memory")
    batch = {"prompt_ids": torch.ones(8, 4), "completion_ids": torch.ones(8, 6)}
    with pytest.raises(torch.OutOfMemoryError):
        trainer.compute_loss(None, batch)
    assert recorded.calls[-1] == "failed"
