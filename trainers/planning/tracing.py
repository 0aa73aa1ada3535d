"""Trace a job: build TRL's trainer on fake tensors and run its scoring, loss, backward and optimizer code, step by step.

Called by `prediction.py` and `explain.py`. Nothing is computed and no memory of the model's size is used. A fake device `cuda` does
not work without a GPU, so operators are those of the CPU; `upstream.memory_names` says where a GPU's differ.
"""

from __future__ import annotations

import contextlib
import logging
import tempfile
import warnings
from collections.abc import Iterator
from typing import Any

from grpo_run.trainers.planning.job import Job
from grpo_run.trainers.planning.model_config import with_layers
from grpo_run.trainers.planning.timeline import Timeline
from grpo_run.trainers.upstream import memory_names

_PROMPTS = 8
"""Rows of the dataset that the trainer is given; none of them is read."""
ATTENTION_DROPOUTS = ("attention_dropout", "attn_pdrop")
"""Names of the rate of attention dropout in configurations of transformers."""


class Trace:
    """A traced trainer. Use `open_trace`."""

    def __init__(self, trainer: Any, reference: Any, tracker: Any, job: Job) -> None:
        self.trainer = trainer
        self.tracker = tracker
        self._reference = reference
        self._job = job
        self._steps = 0

    @property
    def timeline(self) -> Timeline:
        """Everything recorded so far."""
        timeline: Timeline = self.tracker.timeline
        return timeline

    def step(self, batch: int, completion: int) -> int:
        """Trace one optimizer step of one micro-batch; returns the step's number.

        Args:
            batch: rows.
            completion: tokens.
        """
        import torch

        tracker, trainer, number = self.tracker, self.trainer, self._steps
        self._steps += 1
        tracker.selected = batch * completion
        tracker.begin("inputs", number)
        inputs = self._inputs(batch, completion)
        if self._job.scored:
            tracker.begin("score", number)
            self._score(inputs)
        trainer.model.train()
        if self._job.accumulation > 1:
            tracker.begin("earlier micro-batch", number)
            trainer.accelerator.backward(trainer.compute_loss(trainer.model, inputs))
            self._classify_gradients()
        tracker.begin("forward", number)
        loss = trainer.compute_loss(trainer.model, inputs)
        tracker.begin("backward", number)
        trainer.accelerator.backward(loss)
        del loss
        self._classify_gradients()
        tracker.begin("optimizer", number)
        torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), trainer.args.max_grad_norm)
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        del inputs
        tracker.begin("end", number)
        return number

    def checkpoint(self, *, enabled: bool | None = None) -> None:
        """Turn gradient checkpointing on or off; to what the job says if not given."""
        _set_checkpointing(self.trainer, enabled=self._job.checkpointing if enabled is None else enabled)

    def _classify_gradients(self) -> None:
        parameters = self.trainer.model.parameters()
        self.tracker.classify([one.grad for one in parameters if one.grad is not None], "gradients")

    def _inputs(self, batch: int, completion: int) -> dict[str, Any]:
        import torch

        prompt = self._job.prompt
        values = (
            torch.zeros(batch, prompt, dtype=torch.long),
            torch.ones(batch, prompt, dtype=torch.long),
            torch.zeros(batch, completion, dtype=torch.long),
            torch.ones(batch, completion, dtype=torch.long),
            torch.ones(batch),
            torch.tensor(float(batch * completion)),
        )
        return dict(zip(memory_names.INPUT_NAMES, values, strict=False))

    def _score(self, inputs: dict[str, Any]) -> None:
        import torch

        *_, old, reference = memory_names.INPUT_NAMES
        batch, completion = inputs["completion_ids"].shape
        models = {old: self.trainer.model if self._job.rescored else None, reference: self._reference}
        with torch.no_grad(), self._without_checkpointing():
            ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
            mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
            for name, model in models.items():
                if model is not None:
                    inputs[name] = memory_names.score(
                        self.trainer, model, ids, mask, keep=completion, rows=batch
                    )

    @contextlib.contextmanager
    def _without_checkpointing(self) -> Iterator[None]:
        _set_checkpointing(self.trainer, enabled=False)
        try:
            yield
        finally:
            _set_checkpointing(self.trainer, enabled=self._job.checkpointing)


@contextlib.contextmanager
def open_trace(job: Job, config: Any, layers: int) -> Iterator[Trace]:
    """Build the trainer of a job on fake tensors; it is dropped on leaving.

    Args:
        job: sizes and settings.
        config: of the model.
        layers: how many of its layers are traced.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    from grpo_run.trainers.planning.tracker import AllocationTracker

    tracker = AllocationTracker()
    with contextlib.ExitStack() as opened:
        opened.enter_context(_silence())
        folder = opened.enter_context(tempfile.TemporaryDirectory(prefix="grpo-run-plan-"))
        memory_names.forget_accelerator()
        opened.callback(memory_names.forget_accelerator)
        args, dataset, tokenizer = _arguments(job, folder)
        opened.enter_context(memory_names.traced_head(tracker.holding, on_gpu=job.device == "cuda"))
        opened.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        opened.enter_context(tracker)
        yield _build(job, _kernel_config(job, with_layers(config, layers)), args, dataset, tokenizer, tracker)


def _kernel_config(job: Job, config: Any) -> Any:
    """Return a configuration whose attention stores what the device's kernels store.

    The fused kernels of CUDA draw attention dropout again in backward. On a CPU, dropout excludes the fused kernel, and the
    attention matrix is stored.
    """
    if job.device == "cuda" and job.attention == "sdpa":
        text = config.get_text_config()
        for name in ATTENTION_DROPOUTS:
            if getattr(text, name, 0.0):
                setattr(text, name, 0.0)
    return config


def _build(job: Job, config: Any, args: Any, dataset: Any, tokenizer: Any, tracker: Any) -> Trace:
    from trl import GRPOTrainer

    trainer = GRPOTrainer(
        model=_model(job, config),
        args=args,
        reward_funcs=_reward,
        train_dataset=dataset,
        processing_class=tokenizer,
    )
    trainer.create_optimizer()
    if job.optimizer == "adamw_torch" and job.device == "cuda":
        for group in trainer.optimizer.param_groups:
            group["foreach"] = True  # torch's choice for parameters on a GPU
    setattr(trainer, memory_names.ACCUMULATION, 1)
    _set_checkpointing(trainer, enabled=job.checkpointing)  # a real trainer does it in `train()`
    reference = None
    if job.reference:
        reference = _reference(job, config, trainer)
        trainer.beta = 1.0
    return Trace(trainer, reference, tracker, job)


def _set_checkpointing(trainer: Any, *, enabled: bool) -> None:
    if enabled:
        trainer.model.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs=trainer.args.gradient_checkpointing_kwargs
        )
    else:
        trainer.model.gradient_checkpointing_disable()


def _model(job: Job, config: Any) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(
        config, dtype=getattr(torch, job.weights), attn_implementation=job.attention
    )
    model.to = lambda *args, **kwargs: model  # a fake model is where it is
    return model


def _reference(job: Job, config: Any, trainer: Any) -> Any:
    from trl.trainer.utils import add_fused_lm_head

    reference = _model(job, config).eval()
    reference.requires_grad_(False)
    add_fused_lm_head(reference, temperature=trainer.temperature)
    return reference


def _arguments(job: Job, folder: str) -> tuple[Any, Any, Any]:
    """Return the trainer's configuration, dataset and tokenizer: all of them real, and tiny."""
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast
    from trl import GRPOConfig

    args = GRPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=job.autocast,
        report_to=[],
        per_device_train_batch_size=2,
        num_generations=2,
        gradient_checkpointing=job.checkpointing,
        max_completion_length=job.completion,
        beta=0.0,
        max_steps=1,
        disable_tqdm=True,
        optim=job.optimizer,
    )
    words = {"a": 0, "<unk>": 1, "<eos>": 2, "<pad>": 3}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="<unk>")),
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<unk>",
    )
    return args, Dataset.from_dict({"prompt": ["a"] * _PROMPTS}), tokenizer


def _reward(completions: list[Any], **kwargs: Any) -> list[float]:
    raise AssertionError("a trace generates nothing")


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Keep warnings of the libraries about a run that never happens from the terminal."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
