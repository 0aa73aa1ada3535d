"""The trainers of `split_losses.py`: the kind of each, and its settings. Data only."""

from __future__ import annotations

from typing import Any

LONGER = {"steps_per_generation": 4}
"""A rollout serves two optimizer steps."""
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        name: ("GRPO", {"loss_type": name, **LONGER})
        for name in ("grpo", "dr_grpo", "dapo", "cispo", "sapo", "vespo", "luspo", "bnpo")
    },
    "luspo by sequences": ("GRPO", {"loss_type": "luspo", "importance_sampling_level": "sequence", **LONGER}),
    "two iterations by sequences": (
        "GRPO",
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "num_iterations": 2, **LONGER},
    ),
    "reference model": ("GRPO", {"beta": 0.1, "num_iterations": 2, **LONGER}),
    "truncated": ("GRPO", {"scale_rewards": "batch", "mask_truncated_completions": True, **LONGER}),
    "off-policy mask": ("GRPO", {"off_policy_mask_threshold": 0.01, "num_iterations": 2, **LONGER}),
    "three accumulated, four generated, epochs with a rest": (
        "GRPO",
        {"loss_type": "grpo", "gradient_accumulation_steps": 3, "samples": 8, "max_steps": 9, **LONGER},
    ),
    "generation batch": ("GRPO", {"generation_batch_size": 32}),
    "default sizes": ("GRPO", {}),
    "entropy bonus": ("GRPO", {"entropy_coef": 0.05, **LONGER}),
    "top entropy": ("GRPO", {"top_entropy_quantile": 0.5, **LONGER}),
    "rloo": ("RLOO", LONGER),
    "rloo, two iterations": ("RLOO", {"num_iterations": 2, "beta": 0.05, **LONGER}),
    "sft": ("SFT", {}),
    "sft, dft": ("SFT", {"loss_type": "dft"}),
    "sft, smoothed": ("SFT", {"label_smoothing_factor": 0.1}),
    "sft, packed": ("SFT", {"packing": True, "max_length": 16, "samples": 192}),
    "sft, ragged": ("SFT", {"samples": 37, "max_steps": 9}),
}
