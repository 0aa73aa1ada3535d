"""Check common claims about the memory of GRPO: what `grpo-run plan` predicts, and time and forward passes
of real runs on a CPU.

    benchmarks/memory_guide.py [--model SHAPE]     some minutes on two cores

Prints the table of docs/guide/planning.md. Peaks are those of torch's allocator on a CPU, where predictions
have been compared with real runs. Base job: `balanced` in one micro-batch, 16 rows in groups of 8, without
gradient checkpointing unless a row says so.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from grpo_run.runtime.planning.job import Job
from grpo_run.runtime.planning.model_config import load_model_config
from grpo_run.runtime.planning.prediction import Prediction, Predictor

MODEL = "layers=24,hidden=896,heads=14,kv-heads=2,intermediate=4864,vocabulary=151936"
"""Qwen2.5-0.5B."""
TIMED = "layers=6,hidden=256,heads=4,kv-heads=2,intermediate=1024,vocabulary=2048"
SMALL_VOCABULARY = 67
BASE = Job(
    batch=16, prompt=128, completion=384, num_generations=8, checkpointing=False, device="cpu", accumulation=2
)
MIB = 1 << 20
REPEATS = 5


def main(words: Sequence[str]) -> int:
    """Print the table; returns the exit code."""
    parser = argparse.ArgumentParser(description="Check claims about the memory of GRPO.")
    parser.add_argument("--model", default=MODEL, help="shape or folder, as of grpo-run plan")
    model = parser.parse_args(words).model
    print(f"{datetime.datetime.now(tz=datetime.timezone.utc).date()}, {model}\n")
    print("| claim | figure |\n|---|---|")
    for claim, figure in rows(model):
        print(f"| {claim} | {figure} |", flush=True)
    return 0


def rows(model: str) -> Iterator[tuple[str, str]]:
    """Yield claims and figures."""
    yield "three forward passes", ", ".join(f"{name}: {count}" for name, count in passes().items())
    predictor = Predictor(load_model_config(model))

    def predict(**changes: Any) -> Prediction:
        return predictor.predict(replace(BASE, **changes))

    base, checkpointed = predict(), predict(checkpointing=True)
    peak = base.allocated_bytes
    group, length = predict(batch=8, num_generations=4), predict(prompt=64, completion=192)
    prompts = BASE.batch // BASE.num_generations
    sft = {
        name: predict(algorithm="sft", prompt=0, completion=BASE.length, num_generations=0, batch=batch)
        for name, batch in (("same rows", BASE.batch), ("a row per prompt", prompts))
    }
    logits = {count: _kind(predict(accumulation=count), "logits") for count in (2, 4, 16)}
    first, second = model.rpartition("vocabulary=")[::2]
    few = Predictor(load_model_config(f"{first}vocabulary={SMALL_VOCABULARY}")).predict(BASE)
    slower = f"{100 * (slowdown() - 1):+.0f} % time"
    yield from [
        ("half the group saves half", f"{_saved(group, base)} of {_mib(peak)}"),
        ("half the length saves half", f"{_saved(length, base)} of {_mib(peak)}"),
        (
            "accumulation multiplies the logits",
            ", ".join(f"{count}: {_mib(size)}" for count, size in logits.items()),
        ),
        (
            "GRPO needs 6 times as much as SFT",
            ", ".join(f"{name}: {peak / found.allocated_bytes:.1f} times" for name, found in sft.items()),
        ),
        (
            "checkpointing saves 30 to 50 % for 20 to 30 % of the time",
            f"saves {_saved(checkpointed, base)} of {_mib(peak)}; forward and backward {slower}",
        ),
        ("logits dominate", (f"{second} tokens: {_share(base)}; {SMALL_VOCABULARY} tokens: {_share(few)}")),
    ]


def _kind(prediction: Prediction, kind: str) -> float:
    """Return the most bytes of a kind in any phase."""
    return max(memory.traced.get(kind, 0.0) for memory in prediction.phases.values())


def _share(prediction: Prediction) -> str:
    return f"{100 * _kind(prediction, 'logits') / prediction.allocated_bytes:.1f} % of the peak"


def _saved(changed: Prediction, base: Prediction) -> str:
    return f"{100 * (1 - changed.allocated_bytes / base.allocated_bytes):.0f} %"


def _mib(size: float) -> str:
    return f"{size / MIB:,.0f} MiB"


def slowdown() -> float:
    """Return how many times the CPU time of forward and backward is with checkpointing: a median over turns.

    CPU time, because other work on the machine would count otherwise.
    """
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(load_model_config(TIMED), dtype=torch.float32)
    model.train()
    tokens = torch.randint(0, model.config.vocab_size, (4, 256))
    found = []
    for _ in range(REPEATS + 1):
        model.gradient_checkpointing_disable()
        plain = _seconds(model, tokens)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        found.append(_seconds(model, tokens) / plain)
    return statistics.median(found[1:])  # the first one warms up


def _seconds(model: Any, tokens: torch.Tensor) -> float:
    start = time.process_time()
    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    taken = time.process_time() - start
    model.zero_grad()
    return taken


def passes() -> dict[str, int]:
    """Return the forward passes over whole rows in one step of TRL's GRPO trainer, by settings."""
    return {
        "TRL's defaults": _passes(beta=0.0, num_iterations=1),
        "with a reference (beta)": _passes(beta=0.04, num_iterations=1),
        "with a reference and two updates per rollout": _passes(beta=0.04, num_iterations=2),
    }


def _passes(**settings: Any) -> int:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    from grpo_run.trainers.recipes.tiny import tiny_model, tiny_tokenizer

    tokenizer = tiny_tokenizer()
    prompt, count = "x" * 16, 0
    with tempfile.TemporaryDirectory() as folder:
        tiny_model(seed=0, tokenizer=tokenizer).save_pretrained(folder)  # TRL loads the reference from a path
        trainer = GRPOTrainer(
            model=folder,
            reward_funcs=lambda completions, **columns: [float(len(text)) for text in completions],
            args=GRPOConfig(
                output_dir=folder, max_steps=1, per_device_train_batch_size=4, num_generations=4,
                max_completion_length=8, use_cpu=True, bf16=False, report_to=[], save_strategy="no",
                disable_tqdm=True, gradient_checkpointing=False, **settings,
            ),
            train_dataset=Dataset.from_dict({"prompt": [prompt] * 8}),
            processing_class=tokenizer,
        )  # fmt: skip

        def counted(module: Any, arguments: Any, keywords: dict[str, Any]) -> None:
            nonlocal count
            # generation reads the prompts, then single tokens
            count += keywords["input_ids"].shape[1] > len(prompt)

        for model in {id(one): one for one in (trainer.model, trainer.ref_model) if one is not None}.values():
            model.register_forward_pre_hook(counted, with_kwargs=True)
        trainer.train()
    return count


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
