"""The configuration that `memgen-gsm8k` prints is that of the report and of the authors' code."""

from __future__ import annotations

from datasets import Dataset
from transformers import TrainingArguments
from trl import GRPOConfig

from grpo_run.trainers.recipes.memgen import MemgenTask, described
from grpo_run.trainers.recipes.recipe import load_recipe
from grpo_run.trainers.recipes.training import trainer_arguments
from grpo_run.trainers.rewards import correct_answer

PRINTED = """\
reasoner: Qwen/Qwen2.5-1.5B-Instruct, frozen
memory: 16 latents at the prompt's end, 8 after a delimiter
delimiters: ',', '.', '\\n', at most 5 of a completion
adapters: LoRA on q_proj, v_proj
  rank 16, alpha 32, dropout 0.1
weaver: SFT, 2 epochs of 7,473 demonstrations, 4 in a step
  learning rate 1e-05, cosine, warm-up 0.1
trigger: GRPO, 400 steps of 7,473 problems
  8 completions of each, learning rate 1e-05, constant_with_warmup, warm-up 10
  beta 0, loss bnpo, temperature of decisions 1
completions: greedy, at most 512 tokens, repetition penalty 1.2
evaluation: 1,319 problems (GSM8K's test split), greedy (temperature 0), at most 512 tokens; right if the\
 number after the last #### is"""


def test_the_printed_configuration_is_the_documented_one() -> None:
    """Line by line; `docs/guide/memgen.md` lists what differs from the authors' code."""
    recipe = load_recipe("memgen-gsm8k")
    rows = Dataset.from_dict({"prompt": [""] * 7473})
    task = MemgenTask(
        demonstrations=rows, problems=rows, held_out=rows.select(range(1319)), reward=correct_answer,
        scored="the number after the last ####", split="GSM8K's test split", delimiters=",.\n",
    )  # fmt: skip
    weaver = trainer_arguments(TrainingArguments, recipe, "weaver")
    assert described(recipe, task, weaver, trainer_arguments(GRPOConfig, recipe, "grpo")) == PRINTED
