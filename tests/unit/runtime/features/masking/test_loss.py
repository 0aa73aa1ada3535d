"""The loss and its gradient equal a computation by hand in which masked samples do not occur.

By hand: each completion alone through the model, without padding, and the published formula of each
    `loss_type`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_run.runtime.features.masking._masking import mask

Score = Callable[..., Any]

REWARDS = [1.25, 2.0, 4.0, 0.0, 3.0, 0.5, 0.0, 1.5]
LOSS_TYPES = ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "vespo", "luspo"]
LOSE_THE_ROW = ("bnpo", "dapo", "cispo", "vespo")
"""Their divisor counts tokens of the loss; that of the others counts rows."""
BETA = 0.3
CASES = {
    "failed": (tuple({2: math.nan, 5: math.inf}.get(index, value) for index, value in enumerate(REWARDS)),
    None, {2, 5}),
    "left out": (REWARDS, ["", "repetition", "", "", "", "", "deadline", ""], {1, 6}),
    "group": ((1.0, math.nan, math.nan, math.inf, *REWARDS[4:]), None, {0, 1, 2, 3}),
    "all": ((math.nan,) * 8, None, set(range(8))),
}  # fmt: skip
OF_EVERY_LOSS = ("failed", "all")
"""Cases of every `loss_type`; the others are of one that counts rows and one that counts tokens."""
WITH_ALL_CASES = ("grpo", "dapo")
WITH_REFERENCE = ("failed", "group")
"""Cases with a penalty for the distance to a reference model."""


def log_probabilities(model: Any, trainer: Any, completions: SimpleNamespace, row: int) -> torch.Tensor:
    """Return the log-probability of each token of one completion, computed alone."""
    prompt = trainer.processing_class(completions.prompts[row // completions.generations])["input_ids"]
    tokens = torch.tensor([*prompt, *completions.tokens[row]])
    logits = model(input_ids=tokens[None]).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, tokens[len(prompt) :, None])[:, 0]


def token_losses(trainer: Any, now: torch.Tensor, advantage: float) -> torch.Tensor:
    """The policy's loss of each token on policy, where all ratios are 1."""
    ratio = (now - now.detach()).exp()
    match trainer.loss_type:
        case "cispo":  # its weight is a constant, and TRL's bound of it is below 1 by default
            return -min(1.0, trainer.epsilon_high) * advantage * now
        case "vespo":  # its weight is a constant, 1 on policy
            return -advantage * now
        case "sapo":
            temperature = (
                trainer.args.sapo_temperature_pos if advantage > 0 else trainer.args.sapo_temperature_neg
            )
            return -advantage * torch.sigmoid(temperature * (ratio - 1)) * 4 / temperature
        case _:
            return -advantage * ratio


def loss_by_hand(
    trainer: Any, completions: SimpleNamespace, advantages: Sequence[float], left: Sequence[int]
) -> torch.Tensor:
    """The loss over the samples that are left."""
    rows = len(completions.tokens)
    losses = []
    for row in left:
        now = log_probabilities(trainer.model, trainer, completions, row)
        loss = token_losses(trainer, now, advantages[row])
        if trainer.beta:
            with torch.no_grad():
                reference = log_probabilities(trainer.ref_model, trainer, completions, row)
            divergence = (reference - now).exp() - (reference - now) - 1
            loss = loss + trainer.beta * divergence * (now - now.detach()).exp()
        losses.append(loss)
    zero = sum(parameter.sum() * 0 for parameter in trainer.model.parameters())
    total = zero + sum(loss.sum() for loss in losses)
    tokens = max(1, sum(len(loss) for loss in losses))
    match trainer.loss_type:
        case "grpo" | "sapo":
            return zero + sum(loss.mean() for loss in losses) / rows
        case "dr_grpo":
            return total / (rows * trainer.max_completion_length)
        case "luspo":
            return total / rows
        case _:
            assert trainer.loss_type in LOSE_THE_ROW
            return total / tokens


def reference_model(trainer: Any) -> Any:
    """Return a model near the policy, prepared as TRL prepares its reference."""
    from trl.trainer.utils import add_fused_lm_head

    made = type(trainer.model)(trainer.model.config).eval()
    made.load_state_dict({name: value * 1.1 for name, value in trainer.model.state_dict().items()})
    add_fused_lm_head(made, temperature=1.0)
    return made


def gradients(trainer: Any, loss: torch.Tensor) -> torch.Tensor:
    """The gradient of the loss as one vector."""
    trainer.model.zero_grad()
    loss.backward()
    return torch.cat([parameter.grad.flatten() for parameter in trainer.model.parameters()])


@pytest.mark.parametrize(
    ("loss_type", "case"),
    [(name, case) for name in LOSS_TYPES for case in (CASES if name in WITH_ALL_CASES else OF_EVERY_LOSS)],
)
def test_grpo(
    grpo: Any, session: Any, rollout: Score, completions: SimpleNamespace,
    loss_type: str, case: str,
) -> None:  # fmt: skip
    """Every `loss_type`, with and without a penalty for the distance to a reference model."""
    rewards, leaving, excluded = CASES[case]
    beta = BETA if case in WITH_REFERENCE else 0.0
    grpo.loss_type, grpo.beta = loss_type, beta
    if beta:
        grpo.ref_model = reference_model(grpo)
    scored = rollout(grpo, session, rewards, leaving=leaving)
    left = [row for row in range(8) if row not in excluded]
    assert scored["num_items_in_batch"] == sum(len(completions.tokens[row]) for row in left)
    ours = grpo.compute_loss(grpo.model, scored)
    expected = loss_by_hand(grpo, completions, scored["advantages"].tolist(), left)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(gradients(grpo, ours), gradients(grpo, expected), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_rloo(rloo: Any, session: Any, rollout: Score, completions: SimpleNamespace, case: str) -> None:
    """A masked row has the ratio 1 and the advantage 0."""
    rewards, leaving, excluded = CASES[case]
    if case in WITH_REFERENCE:
        rloo.beta, rloo.ref_model = BETA, reference_model(rloo)
    scored = rollout(rloo, session, rewards, leaving=leaving)
    ours = rloo.compute_loss(rloo.model, scored)
    expected = sum(parameter.sum() * 0 for parameter in rloo.model.parameters())
    for row in (row for row in range(8) if row not in excluded):
        now = log_probabilities(rloo.model, rloo, completions, row).sum()
        expected = expected - (now - now.detach()).exp() * scored["advantages"][row].item() / 8
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(gradients(rloo, ours), gradients(rloo, expected), rtol=1e-3, atol=1e-6)


def test_a_cut_completion_leaves_the_baseline(either: Any, session: Any, rollout: Score) -> None:
    """The advantages are those of a rollout in which its reward is missing."""
    leaving = ["", "repetition", "", "", "", "", "", ""]
    cut = rollout(either, session, REWARDS, leaving=leaving)["advantages"]
    missing = rollout(either, session, [1.25, None, *REWARDS[2:]])["advantages"]
    assert torch.equal(cut, missing)


def test_length_is_left_to_trl(grpo: Any, session: Any, rollout: Score) -> None:
    """TRL masks truncated completions itself if it is told to, and keeps them in the baseline."""
    grpo.mask_truncated_completions = True
    scored = rollout(grpo, session, REWARDS, leaving=[""] * 8)
    assert "tool_mask" not in scored
    assert scored["completion_mask"][3].sum() == 0
    assert scored["advantages"][3] != 0


def test_a_mask_of_tools_is_kept(
    grpo: Any, session: Any, rollout: Score, completions: SimpleNamespace
) -> None:
    """What tools have written stays out of the loss, and out of the number of tokens."""
    generate = grpo._generate
    tools = [[1] * len(tokens) for tokens in completions.tokens]
    tools[4][1] = tools[2][0] = 0

    def with_tools(prompts: Any) -> Any:
        answer = list(generate(prompts))
        answer[2] = tools
        return tuple(answer)

    grpo._generate = with_tools
    scored = rollout(grpo, session, CASES["failed"][0])
    assert scored["tool_mask"][4].tolist() == [1, 0, 1, 1, 1, 1]
    assert scored["tool_mask"][2].sum() == 0
    left = [row for row in range(8) if row not in (2, 5)]
    assert scored["num_items_in_batch"] == sum(map(len, [completions.tokens[row] for row in left])) - 1


def test_without_exclusions_the_rollout_is_what_trl_returns(
    either: Any, session: Any, rollout: Score
) -> None:
    """Bit for bit, with the same keys."""
    inputs = [{"prompt": prompt} for prompt in ["ab12cd"] * 4 + ["xy34zw"] * 4]
    ours = rollout(either, session, REWARDS, leaving=[""] * 8)
    plain = either._generate_and_score_completions(inputs)
    assert ours.keys() == plain.keys()
    for name, value in plain.items():
        assert torch.equal(ours[name], value), name


def test_a_long_masked_completion_of_rloo_has_no_infinite_ratio() -> None:
    """With the mask alone its ratio would be an exponential of hundreds, and 0 times infinity is NaN."""
    rollout = {
        "completion_mask": torch.ones(2, 3, dtype=torch.long),
        "old_logps": torch.tensor([-300.0, -2.0]),
        "advantages": torch.tensor([math.nan, 1.0]),
    }
    mask(rollout, [0], gather=lambda tensor: tensor)
    assert rollout["completion_mask"].tolist() == [[0, 0, 0], [1, 1, 1]]
    assert rollout["old_logps"].tolist() == [0, -2]
    assert rollout["advantages"].tolist() == [0, 1]
