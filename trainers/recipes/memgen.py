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

from grpo_run.trainers.memgen import evaluation
from grpo_run.trainers.memgen.generation import GenerationSettings
from grpo_run.trainers.memgen.model import MemGen
from grpo_run.trainers.memgen.saved import load, prompt_tokens, save
from grpo_run.trainers.memgen.training import TriggerTrainer, WeaverTrainer
from grpo_run.trainers.recipes import chains, gsm8k
from grpo_run.trainers.recipes.recipe import TINY, Recipe
from grpo_run.trainers.recipes.training import (
    IGNORED_LABEL,
    Reward,
    Transform,
    load_policy,
    trainer_arguments,
    warm_start,
)
from grpo_run.trainers.rewards import correct_answer

PRETRAINING_ROWS = 40_000
"""More than one epoch of the packaged settings needs on two ranks, as the other numbers of rows."""
DEMONSTRATIONS = 40_000
PROBLEMS = 4_096
HELD_OUT = 1_000


@dataclass(frozen=True, kw_only=True)
class MemgenTask:
    """What a recipe trains MemGen on.

    Attributes:
        demonstrations: columns `prompt` and `completion`, for the weaver.
        problems: column `prompt` and the columns that the reward takes, for the trigger.
        held_out: as `problems`, for the evaluation.
        reward: the trigger's reward and the score of the evaluation.
        scored: what it takes for the answer, for the user.
        split: what is held out, for the user.
        delimiters: characters after which memory may be woven: tokens that end with one are delimiters.
    """

    demonstrations: Dataset
    problems: Dataset
    held_out: Dataset
    reward: Reward
    scored: str
    split: str
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
            held_out=_chains("held out", recipe.memgen.evaluation_problems or HELD_OUT, held_out=True),
            reward=chains.correct_chain,
            scored="the whole chain",
            split="chains that no stage has seen",
            delimiters=chains.DELIMITERS,
        ),
    )


def train_gsm8k(recipe: Recipe) -> None:
    """Train MemGen on GSM8K: the weaver on the reference solutions, the trigger on the number after `####`.
    The official test split is held out.
    """
    assert recipe.memgen is not None
    problems = gsm8k.problems_of(recipe)
    texts = [f"{one.question} {one.solution}" for one in problems[: gsm8k.TOKENIZER_PROBLEMS]]
    model, tokenizer = load_policy(recipe, texts=texts if recipe.model == TINY else None)
    chat = tokenizer.chat_template is not None
    questions = gsm8k.questions(problems, chat=chat)
    solutions = [f" {gsm8k.without_calculator(one.solution)}" for one in problems]
    held_out = gsm8k.problems_of(recipe, "test")[: recipe.memgen.evaluation_problems]
    train(
        recipe,
        model,
        tokenizer,
        MemgenTask(
            demonstrations=questions.add_column("completion", solutions),
            problems=questions,
            held_out=gsm8k.questions(held_out, chat=chat),
            reward=correct_answer,
            scored="the number after the last ####",
            split="GSM8K's test split",
            delimiters=",.\n",
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
    weaver_arguments = trainer_arguments(TrainingArguments, recipe, "weaver", remove_unused_columns=False)
    arguments = trainer_arguments(GRPOConfig, recipe, "grpo")
    reasoner = AutoModelForCausalLM.from_pretrained(model) if isinstance(model, str) else model
    with torch.random.fork_rng():
        torch.manual_seed(recipe.seed)
        memgen = MemGen(reasoner, recipe.memgen, delimiters_of(tokenizer, task.delimiters))
    ends = reasoner.generation_config.eos_token_id
    generation = GenerationSettings(
        max_tokens=arguments.max_completion_length,
        repetition_penalty=arguments.repetition_penalty,
        temperature=arguments.temperature,
        end_tokens=ends if isinstance(ends, list) else [ends],
        pad_token=tokenizer.pad_token_id,
        repetition_window=recipe.caps.repetition or 0 if recipe.caps else 0,
        max_seconds=recipe.caps.max_time if recipe.caps else None,
    )
    if PartialState().is_main_process:
        print(described(recipe, task, weaver_arguments, arguments), flush=True)
    weaver = WeaverTrainer(
        memgen,
        weaver_arguments,
        max_length=recipe.memgen.max_length,
        train_dataset=task.demonstrations.with_transform(_demonstration_encoder(tokenizer)),
        processing_class=tokenizer,
    )
    weaver.train()
    trigger = TriggerTrainer(
        memgen,
        generation,
        reward_funcs=[task.reward],
        # made anew: a second trainer with DeepSpeed needs arguments that were made after the first one
        args=trainer_arguments(GRPOConfig, recipe, "grpo"),
        train_dataset=task.problems,
        processing_class=tokenizer,
    )
    trigger.train()
    logs = weaver.state.log_history, trigger.state.log_history
    folder = Path(recipe.output_dir).expanduser()
    if PartialState().is_main_process:
        save(memgen, tokenizer, generation, folder / "final")
    PartialState().wait_for_everyone()
    del weaver, trigger, memgen, reasoner, model  # what was saved is evaluated
    outcomes = evaluation.evaluate(
        load(folder / "final", PartialState().device).memgen,
        [prompt_tokens(tokenizer, prompt) for prompt in task.held_out["prompt"]],
        _scorer(task, tokenizer),
        generation,
        batch_size=recipe.memgen.evaluation_batch_size,
        file=folder / "evaluation.jsonl",
    )
    if PartialState().is_main_process:
        experiment = evaluation.experiment_of(outcomes, *logs, tokenizer.convert_ids_to_tokens)
        (folder / "experiment.json").write_text(json.dumps(experiment, indent=1) + "\n")
        shown = ", ".join(f"{name} {value:.1%}" for name, value in experiment["accuracy"].items())
        print(f"accuracy on {_evaluated(task, generation.max_tokens)}: {shown}", flush=True)


def described(recipe: Recipe, task: MemgenTask, weaver: TrainingArguments, trigger: GRPOConfig) -> str:
    """Return the configuration, a line for each part, with what the ranks together do in a step."""
    assert recipe.memgen is not None
    sizes, completions = recipe.memgen, trigger.max_completion_length
    rows = weaver.per_device_train_batch_size * weaver.gradient_accumulation_steps * weaver.world_size
    return f"""\
reasoner: {recipe.model}, frozen
memory: {sizes.prompt_latents} latents at the prompt's end, {sizes.latents} after a delimiter
delimiters: {", ".join(map(repr, task.delimiters))}, at most {sizes.augmentations} of a completion
adapters: LoRA on {", ".join(sizes.lora_targets)}
  rank {sizes.lora_rank}, alpha {sizes.lora_alpha}, dropout {sizes.lora_dropout:g}
weaver: SFT, {_length(weaver)} of {len(task.demonstrations):,} demonstrations, {rows} in a step
  {_schedule(weaver)}
trigger: GRPO, {_length(trigger)} of {len(task.problems):,} problems
  {trigger.num_generations} completions of each, {_schedule(trigger)}
  beta {trigger.beta:g}, loss {trigger.loss_type}, temperature of decisions {trigger.temperature:g}
completions: greedy, at most {completions:,} tokens, repetition penalty {trigger.repetition_penalty:g}
evaluation: {_evaluated(task, completions)}"""


def _length(arguments: TrainingArguments) -> str:
    if arguments.max_steps > 0:
        return f"{arguments.max_steps:,} steps"
    return f"{arguments.num_train_epochs:g} epochs"


def _schedule(arguments: TrainingArguments) -> str:
    kind = getattr(arguments.lr_scheduler_type, "value", arguments.lr_scheduler_type)
    return f"learning rate {arguments.learning_rate:g}, {kind}, warm-up {arguments.warmup_steps:g}"


def _evaluated(task: MemgenTask, tokens: int) -> str:
    how = f"greedy (temperature 0), at most {tokens:,} tokens"
    return f"{len(task.held_out):,} problems ({task.split}), {how}; right if {task.scored} is"


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
