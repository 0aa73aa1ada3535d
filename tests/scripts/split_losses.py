"""Train each loss of TRL with whole micro-batches and with smaller ones, and write how far the weights are
apart.

Needs no launcher but torchrun's environment. Applies memory plans as a rank does, without a supervisor.
Writes `distances-rank{r}.json`: for each case the distances of the weights relative to their norm, by plan.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import tiny
import torch
import trl
from split_cases import CASES

from grpo_run.runtime.features.memory_plan import _configuration as configuration
from grpo_run.runtime.features.memory_plan import _remedies as remedies

PLANS = {
    "again": {},
    "halves": {"micro_batch_divisor": 2},
    "quarters": {"micro_batch_divisor": 4},
    "checkpointing": {"gradient_checkpointing": True},
}


def train(name: str, plan: dict[str, Any], folder: Path) -> dict[str, torch.Tensor]:
    """Train one case, and return its weights."""
    kind, changed = CASES[name]
    own = dict(changed)
    samples = own.pop("samples", 64 if kind == "SFT" else 30)
    # what is refused is split all the same, to see that it must be
    remedies.why_not_divided = lambda arguments: ""
    arguments = argparse.Namespace(seed=11, settings=own, output_dir=folder / name)
    rollouts = {"num_generations": 4, "max_completion_length": 6, "beta": 0.0} if kind != "SFT" else {}
    given = getattr(trl, f"{kind}Config")(
        **{
            "output_dir": str(folder / name), "max_steps": 6, "save_strategy": "no", "logging_steps": 10,
            "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "learning_rate": 1e-3,
            "seed": 11,
            "use_cpu": True, "bf16": False, "activation_checkpointing": False, "report_to": [],
            "disable_tqdm": True, "dataloader_pin_memory": False, **rollouts, **own,
        }
    )  # fmt: skip
    made, _ = configuration.apply(given, plan)
    tokenizer = tiny.tokenizer()
    trainer = getattr(trl, f"{kind}Trainer")(
        model=tiny.policy(len(tokenizer), arguments),
        args=made,
        train_dataset=tiny.texts(samples) if kind == "SFT" else tiny.prompts(samples),
        processing_class=tokenizer,
        **({} if kind == "SFT" else {"reward_funcs": tiny.rewards(0.0)}),
    )
    trainer.train()
    assert trainer.model.is_activation_checkpointing is plan.get("gradient_checkpointing", False)
    state = trainer.accelerator.unwrap_model(trainer.model).state_dict()
    return {key: tensor.detach().clone().double() for key, tensor in state.items()}


def distance(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Return the norm of the difference, relative to that of the expected weights."""
    apart = sum(float((found[key] - expected[key]).square().sum()) for key in expected)
    return (apart / sum(float(tensor.square().sum()) for tensor in expected.values())) ** 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--cases", nargs="*", default=list(CASES))
    parser.add_argument("--plans", nargs="*", default=list(PLANS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    distances: dict[str, dict[str, float]] = {}
    for name in arguments.cases:
        expected = train(name, {}, arguments.output_dir)
        distances[name] = {
            plan: distance(train(name, PLANS[plan], arguments.output_dir), expected)
            for plan in arguments.plans
        }
    path = arguments.output_dir / f"distances-rank{os.environ.get('RANK', '0')}.json"
    path.write_text(json.dumps(distances))


if __name__ == "__main__":
    main()
