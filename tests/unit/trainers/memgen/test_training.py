"""The trigger's loss has its decisions, at the prompt's end and at delimiters; settings without an effect are
refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from trl import GRPOConfig

from grpo_run.runtime.errors import ConfigError
from grpo_run.trainers.memgen.generation import GenerationSettings
from grpo_run.trainers.memgen.model import HEAD, NO_DECISION, MemGen
from grpo_run.trainers.memgen.training import TriggerTrainer
from grpo_run.trainers.memory_settings import MemorySettings
from grpo_run.trainers.recipes.tiny import tiny_model, tiny_tokenizer

TOKENIZER = tiny_tokenizer("abcdefghij,;")
PROMPTS = ["abc", "j", "ff,ghij", "hhhh"]


def trainer(folder: Path, generation: dict[str, Any] | None = None, **changed: Any) -> TriggerTrainer:
    """A trainer in float64 whose trigger and weaver are random, without dropout."""
    torch.manual_seed(0)
    sizes = MemorySettings(prompt_latents=2, latents=2, augmentations=2, lora_rank=4, lora_dropout=0.0)
    made = MemGen(
        tiny_model(seed=1, tokenizer=TOKENIZER, width=32).double(),
        sizes,
        TOKENIZER.convert_tokens_to_ids([",", "a", "c", "e"]),
    )
    for model in (made.weaver.double(), made.trigger.double()):
        for parameter in model.parameters():
            if parameter.requires_grad:
                torch.nn.init.normal_(parameter, std=0.3)
    given: dict[str, Any] = {
        "output_dir": str(folder), "per_device_train_batch_size": 4, "num_generations": 2, "use_cpu": True,
        "bf16": False, "gradient_checkpointing": False, "report_to": [], "loss_type": "bnpo",
        "max_completion_length": 10, "temperature": 0.5,
    }  # fmt: skip
    settings = {"max_tokens": 10, "end_tokens": [TOKENIZER.eos_token_id], "pad_token": TOKENIZER.pad_token_id}
    return TriggerTrainer(
        made,
        GenerationSettings(**settings, **({"temperature": 0.5} | (generation or {}))),
        reward_funcs=[lambda completions, **columns: [float(len(text)) for text in completions]],
        args=GRPOConfig(**(given | changed)),
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
        processing_class=TOKENIZER,
    )


def test_the_loss_has_the_decision_before_each_token(tmp_path: Path) -> None:
    """Each row alone, without padding: the logits after the prompt belong to the first decision. They are
    divided by the temperature with which it was sampled.
    """
    made = trainer(tmp_path)
    found = made._rollout(PROMPTS, made)
    assert all(mask[0] == 1 for mask in found["env_mask"])
    assert any(sum(mask) > 1 for mask in found["env_mask"])
    length = max(map(len, found["completion_ids"]))
    longest = max(map(len, found["prompt_ids"]))
    rows = [
        [TOKENIZER.pad_token_id] * (longest - len(prompt)) + prompt + done + [0] * (length - len(done))
        for prompt, done in zip(found["prompt_ids"], found["completion_ids"], strict=True)
    ]
    masks = [
        [0] * (longest - len(prompt)) + [1] * (len(prompt) + len(done)) + [0] * (length - len(done))
        for prompt, done in zip(found["prompt_ids"], found["completion_ids"], strict=True)
    ]
    logs, _, _ = made._get_per_token_logps_and_entropies(
        made.model, torch.tensor(rows), torch.tensor(masks), length
    )
    head = made._memgen.trigger.get_base_model().get_submodule(HEAD).modules_to_save["default"]
    decisions = made._decisions
    assert decisions is not None
    for number, (prompt, done) in enumerate(zip(found["prompt_ids"], found["completion_ids"], strict=True)):
        ids = torch.tensor([prompt + done])
        states = made._memgen.trigger(ids, use_cache=False, output_hidden_states=True).hidden_states[-1][0]
        for place in range(len(done)):
            decision = int(decisions[number, place])
            if decision != NO_DECISION:
                logits = (states[len(prompt) + place - 1] @ head.weight.T + head.bias) / 0.5
                # the trainer computes it in single precision, as TRL does
                torch.testing.assert_close(
                    logs[number, place].double(), logits.log_softmax(-1)[decision], rtol=1e-5, atol=1e-6
                )


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"loss_type": "dapo"}, "loss_type=dapo divides by the number of tokens"),
        ({"top_p": 0.9}, "MemGen's rollouts do not use top_p"),
        ({"top_k": 5, "min_p": 0.1}, "do not use top_k, min_p"),
        ({"generation_kwargs": {"seed": 1}}, "do not use generation_kwargs"),
        ({"temperature": 0.7}, r"temperature is 0\.7 in GRPOConfig and 0\.5 in GenerationSettings"),
        ({"repetition_penalty": 1.2}, r"repetition_penalty is 1\.2 in GRPOConfig"),
    ],
)
def test_a_setting_without_an_effect_is_refused(tmp_path: Path, changed: dict[str, Any], line: str) -> None:
    """Or one with which the loss would be another."""
    with pytest.raises(ConfigError, match=line):
        trainer(tmp_path, **changed)
