"""The stages of MemGen's recipes: SFT of the weaver, GRPO of the trigger, evaluation; and the arithmetic
task.

Called by `__main__.py`. Each stage resumes by itself: the trainers from their checkpoints, the evaluation
from its file of results. `memgen-arithmetic` pre-trains its reasoner first. Loss curves, accuracy and firing
rates go to `experiment.json` in the output directory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from datasets import Dataset
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments
from trl import GRPOConfig

from grpo_run.runtime.errors import ConfigError
from grpo_run.trainers.memgen import evaluation
from grpo_run.trainers.memgen.generation import GenerationSettings
from grpo_run.trainers.memgen.model import MemGen, MemorySettings
from grpo_run.trainers.memgen.training import TriggerTrainer, WeaverTrainer, prompt_tokens
from grpo_run.trainers.recipes import chains, gsm8k
from grpo_run.trainers.recipes.recipe import TINY, Recipe
from grpo_run.trainers.recipes.training import (
    IGNORED_LABEL,
    Reward,
    Transform,
    load_policy,
    shared_arguments,
    warm_start,
)
from grpo_run.trainers.rewards import correct_answer

PRETRAINING_ROWS = 40_000
"""More than one epoch of the packaged settings needs on two ranks, as the other numbers of rows."""
DEMONSTRATIONS = 40_000
PROBLEMS = 4_096


@dataclass(frozen=True, kw_only=True)
class MemgenTask:
    """What a recipe trains MemGen on.

    Attributes:
        demonstrations: columns `prompt` and `completion`, for the weaver.
        problems: column `prompt` and the columns that the reward takes, for the trigger.
        held_out: as `problems`, for the evaluation.
        reward: the trigger's reward and the score of the evaluation.
        delimiters: characters after which memory may be woven: tokens that end with one are delimiters.
    """

    demonstrations: Dataset
    problems: Dataset
    held_out: Dataset
    reward: Reward
    delimiters: str


def train_arithmetic(recipe: Recipe) -> None:
    """Pre-train the reasoner on chains, and train MemGen on it."""
    assert recipe.memgen is not None
    model, tokenizer = load_policy(recipe, characters=chains.CHARACTERS)
    if recipe.sft is not None:
        rows = Dataset.from_dict(chains.pretraining_rows(recipe.seed, PRETRAINING_ROWS))
        trained = warm_start(recipe, model, tokenizer, rows, _parts_encoder(tokenizer))
        # trainers replace `forward` of their model by a closure, which copies of the model would share
        model, _ = load_policy(recipe, characters=chains.CHARACTERS)
        assert not isinstance(model, str), "the recipe's model is built here"
        model.load_state_dict(trained.state_dict())
    train(
        recipe,
        model,
        tokenizer,
        MemgenTask(
            demonstrations=Dataset.from_dict(chains.demonstrations(recipe.seed, DEMONSTRATIONS)),
            problems=_chains(f"problems {recipe.seed}", PROBLEMS),
            held_out=_chains("held out", recipe.memgen.evaluation_problems, held_out=True),
            reward=chains.correct_chain,
            delimiters=chains.DELIMITERS,
        ),
    )


def train_gsm8k(recipe: Recipe) -> None:
    """Train MemGen on GSM8K: the weaver on the reference solutions, the trigger and the evaluation on the
    number after `####`. The last problems are held out.
    """
    assert recipe.memgen is not None
    problems = gsm8k.problems_of(recipe)
    texts = [f"{one.question} {one.solution}" for one in problems[: gsm8k.TOKENIZER_PROBLEMS]]
    model, tokenizer = load_policy(recipe, texts=texts if recipe.model == TINY else None)
    count = recipe.memgen.evaluation_problems
    if count >= len(problems):
        raise ConfigError(
            f"memgen.evaluation_problems = {count}: only {len(problems)} problems are there, and some are"
            " trained on"
        )
    questions = gsm8k.questions(problems, chat=tokenizer.chat_template is not None)
    solutions = [f" {gsm8k.without_calculator(one.solution)}" for one in problems]
    train(
        recipe,
        model,
        tokenizer,
        MemgenTask(
            demonstrations=questions.add_column("completion", solutions).select(range(len(problems) - count)),
            problems=questions.select(range(len(problems) - count)),
            held_out=questions.select(range(len(problems) - count, len(problems))),
            reward=correct_answer,
            delimiters=".\n",
        ),
    )


def _chains(seed: str, count: int, *, held_out: bool = False) -> Dataset:
    found = chains.chains(seed, count, held_out=held_out)
    return Dataset.from_dict(
        {"prompt": [chain.prompt for chain in found], "solution": ["".join(chain.steps()) for chain in found]}
    )


def train(
    recipe: Recipe, model: PreTrainedModel | str, tokenizer: PreTrainedTokenizerBase, task: MemgenTask
) -> None:
    """Train weaver and trigger over a frozen reasoner, evaluate, and write the results."""
    assert recipe.memgen is not None
    assert recipe.weaver is not None
    reasoner = AutoModelForCausalLM.from_pretrained(model) if isinstance(model, str) else model
    sizes = recipe.memgen.model_dump(include=set(MemorySettings.__dataclass_fields__))
    with torch.random.fork_rng():
        torch.manual_seed(recipe.seed)
        memgen = MemGen(reasoner, MemorySettings(**sizes), delimiters_of(tokenizer, task.delimiters))
    ends = reasoner.generation_config.eos_token_id
    generation = GenerationSettings(
        max_tokens=recipe.grpo.max_completion_length,
        repetition_penalty=recipe.grpo.repetition_penalty or 1.0,
        end_tokens=ends if isinstance(ends, list) else [ends],
        pad_token=tokenizer.pad_token_id,
        repetition_window=recipe.caps.repetition or 0 if recipe.caps else 0,
        max_seconds=recipe.caps.max_time if recipe.caps else None,
    )
    weaver = WeaverTrainer(
        memgen,
        TrainingArguments(**shared_arguments(recipe, recipe.weaver, "weaver"), remove_unused_columns=False),
        max_length=recipe.memgen.max_length,
        train_dataset=task.demonstrations.with_transform(_demonstration_encoder(tokenizer)),
        processing_class=tokenizer,
    )
    weaver.train()
    trigger = TriggerTrainer(
        memgen,
        generation,
        reward_funcs=[task.reward],
        args=GRPOConfig(**shared_arguments(recipe, recipe.grpo, "grpo")),
        train_dataset=task.problems,
        processing_class=tokenizer,
    )
    trigger.train()
    folder = Path(recipe.output_dir).expanduser()
    weaver.save_model(str(folder / "weaver-final"))
    trigger.save_model(str(folder / "trigger-final"))
    outcomes = evaluation.evaluate(
        memgen,
        [prompt_tokens(tokenizer, prompt) for prompt in task.held_out["prompt"]],
        _scorer(task, tokenizer),
        generation,
        batch_size=recipe.memgen.evaluation_batch_size,
        file=folder / "evaluation.jsonl",
    )
    if PartialState().is_main_process:
        experiment = evaluation.experiment_of(
            outcomes, weaver.state.log_history, trigger.state.log_history, tokenizer.convert_ids_to_tokens
        )
        (folder / "experiment.json").write_text(json.dumps(experiment, indent=1) + "\n")
        shown = ", ".join(f"{name} {value:.1%}" for name, value in experiment["accuracy"].items())
        print(
            f"accuracy on {len(task.held_out)} held-out problems: {shown}; greedy (temperature 0), at most"
            f" {generation.max_tokens} tokens",
            flush=True,
        )


def delimiters_of(tokenizer: PreTrainedTokenizerBase, characters: str) -> list[int]:
    """Return the ids of the tokens whose text ends with one of the characters."""
    special = set(tokenizer.all_special_ids)
    texts = tokenizer.batch_decode([[token] for token in range(len(tokenizer))])
    return [
        number
        for number, text in enumerate(texts)
        if text.endswith(tuple(characters)) and number not in special
    ]


def _parts_encoder(tokenizer: PreTrainedTokenizerBase) -> Transform:
    """Return a transform from `parts`, read and learned in turn, to `input_ids` and masked `labels`."""

    def encode(rows: dict[str, list[Any]]) -> dict[str, list[list[int]]]:
        found: dict[str, list[list[int]]] = {"input_ids": [], "labels": []}
        for parts in rows["parts"]:
            ids: list[int] = []
            labels: list[int] = []
            for number, part in enumerate([*parts, tokenizer.eos_token]):
                tokens = tokenizer(part, add_special_tokens=False)["input_ids"]
                ids += tokens
                labels += tokens if number % 2 else [IGNORED_LABEL] * len(tokens)
            found["input_ids"].append(ids)
            found["labels"].append(labels)
        return found

    return encode


def _demonstration_encoder(tokenizer: PreTrainedTokenizerBase) -> Transform:
    """Return a transform from `prompt` and `completion` to `prompt_ids` and `completion_ids`."""

    def encode(rows: dict[str, list[Any]]) -> dict[str, list[list[int]]]:
        completions = tokenizer(rows["completion"], add_special_tokens=False)["input_ids"]
        return {
            "prompt_ids": [prompt_tokens(tokenizer, prompt) for prompt in rows["prompt"]],
            "completion_ids": [[*completion, tokenizer.eos_token_id] for completion in completions],
        }

    return encode


def _scorer(task: MemgenTask, tokenizer: PreTrainedTokenizerBase) -> Callable[[int, Sequence[int]], float]:
    """Return the score of a held-out problem's completion."""

    def score(number: int, tokens: Sequence[int]) -> float:
        columns = {name: [value] for name, value in task.held_out[number].items() if name != "prompt"}
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        return task.reward([text], **columns)[0]

    return score
