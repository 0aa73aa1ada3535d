"""Trace a job: build TRL's trainer on fake tensors and run its scoring, loss, backward and optimizer code,
step by step.

Called by `prediction.py`. Nothing is computed and no memory of the model's size is used. A
fake device `cuda` does not work without a GPU, so operators are those of the CPU; `upstream.memory_names`
says where a GPU's differ.
"""

from __future__ import annotations

import contextlib
import logging
import tempfile
import warnings
from collections.abc import Iterator
from typing import Any

from grpo_run.runtime.errors import ConfigError
from grpo_run.runtime.planning._terms import counted
from grpo_run.runtime.planning._traced_trainer import arguments_of, build, set_checkpointing
from grpo_run.runtime.planning.job import Job
from grpo_run.runtime.planning.model_config import with_layers
from grpo_run.runtime.upstream import memory_names
from grpo_run.runtime.upstream.features import PLAN, check_available

MAX_REASON = 200
"""Characters of another library's message that are passed on."""


class Trace:
    """A traced trainer. Use `open_trace`."""

    def __init__(self, trainer: Any, reference: Any, tracker: Any, job: Job) -> None:
        self.trainer = trainer
        self.tracker = tracker
        self._reference = reference
        self._job = job
        trained = [one for one in trainer.model.parameters() if one.requires_grad]
        self.trained_parameters = sum(one.numel() for one in trained)
        self._count, self._known = len(trained), 0
        for one in trained:
            one.register_post_accumulate_grad_hook(self._gradient_known)

    def step(self) -> None:
        """Trace one optimizer step of one micro-batch. The tracker has the peaks of its phases afterwards."""
        import torch

        tracker, trainer = self.tracker, self.trainer
        tracker.peaks.clear()
        if self._job.transformers_generates:
            self._generate()
        tracker.begin("inputs")
        inputs = self._inputs()
        if self._job.scored:
            tracker.begin("score")
            self._score(inputs)
        trainer.model.train()
        if self._job.accumulation > 1:
            tracker.begin("earlier micro-batch")
            trainer.accelerator.backward(self._loss(inputs))
        tracker.begin("forward")
        loss = self._loss(inputs)
        tracker.begin("backward")
        self._known = 0
        trainer.accelerator.backward(loss)
        del loss
        tracker.begin("optimizer")
        torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), trainer.args.max_grad_norm)
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        del inputs
        tracker.begin("end")

    def _gradient_known(self, parameter: Any) -> None:
        """Count a gradient as one, and begin a window with half of them: before, the activations of most
        layers are alive, afterwards the gradients of most.
        """
        self.tracker.classify(parameter.grad, "gradients")
        self._known += 1
        if self._known == self._count // 2:
            self.tracker.begin_window()

    def _loss(self, inputs: dict[str, Any]) -> Any:
        """Return the loss; TRL's trainers read the number of tokens of the step from their inputs or as an
        argument.
        """
        model = self.trainer.model
        if self._job.generates:
            return self.trainer.compute_loss(model, inputs)
        given = {name: inputs[name] for name in memory_names.SFT_INPUT_NAMES}
        return self.trainer.compute_loss(model, given, num_items_in_batch=inputs[memory_names.TOKENS])

    def _inputs(self) -> dict[str, Any]:
        import torch

        batch, completion = self._job.batch, self._job.completion
        # a row of SFT has no label for its first token
        self.tracker.selected = batch * (completion if self._job.generates else completion - 1)
        if not self._job.generates:
            names = memory_names.SFT_INPUT_NAMES
            rows: dict[str, Any] = {name: torch.zeros(batch, completion, dtype=torch.long) for name in names}
            return {**rows, memory_names.TOKENS: torch.tensor(batch * completion)}
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
                    # with adapters, the reference is the model that training began with
                    begun_with = name == reference and self._job.lora_rank
                    with self.trainer.model.disable_adapter() if begun_with else contextlib.nullcontext():
                        scores = memory_names.score(
                            self.trainer, model, ids, mask, keep=completion, rows=batch
                        )
                    if self._job.algorithm == "grpo":
                        inputs[name] = scores
                    elif name == old:
                        inputs[memory_names.OLD_SUMS] = (scores * inputs["completion_mask"]).sum(1)

    def _generate(self) -> None:
        """Trace the two tokens of a generation by transformers that can need most: the first, which reads the
        prompt, and the last.

        Between them the cache grows, so tokens in the middle need less than the last.
        """
        import torch

        model, tracker = self.trainer.model, self.tracker
        rows = self._job.batch * self._job.rollout_batches
        with torch.no_grad(), self._without_checkpointing():
            for window, length in ((0, self._job.prompt), (2, self._job.length - 1)):
                tracker.begin("before generate")
                ids, cache = torch.zeros(rows, length, dtype=torch.long), None
                if window > 0 and length > 1:  # all tokens but the last are in the cache
                    cache = model(input_ids=ids[:, :-1], use_cache=True, logits_to_keep=1).past_key_values
                tracker.begin("generate", window)
                model.generate(
                    input_ids=ids,
                    attention_mask=torch.ones_like(ids),
                    generation_config=self.trainer.generation_config,
                    past_key_values=cache,
                )

    @contextlib.contextmanager
    def _without_checkpointing(self) -> Iterator[None]:
        set_checkpointing(self.trainer, enabled=False)
        try:
            yield
        finally:
            set_checkpointing(self.trainer, enabled=self._job.checkpointing)


@contextlib.contextmanager
def open_trace(job: Job, config: Any, layers: int) -> Iterator[Trace]:
    """Build the trainer of a job on fake tensors; it is dropped on leaving.

    Args:
        job: sizes and settings.
        config: of the model.
        layers: how many of its layers are traced.

    Raises:
        ConfigError: the model, TRL or peft cannot run this job, or not without data.
    """
    check_available(PLAN)
    from grpo_run.runtime.planning._tracker import AllocationTracker
    from grpo_run.runtime.upstream.dispatch_modes import FakeTensorMode

    tracker = AllocationTracker(counted(job))
    with contextlib.ExitStack() as opened:
        opened.enter_context(silence())
        folder = opened.enter_context(tempfile.TemporaryDirectory(prefix="grpo-run-plan-"))
        memory_names.forget_accelerator()
        opened.callback(memory_names.forget_accelerator)
        arguments = arguments_of(job, folder)
        opened.enter_context(memory_names.traced_head(tracker.holding, on_gpu=job.device == "cuda"))
        opened.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        opened.enter_context(tracker)
        try:
            trainer, reference = build(job, with_layers(config, layers), arguments)
            yield Trace(trainer, reference, tracker, job)
        except (AssertionError, ConfigError):
            raise
        except Exception as error:
            text = " ".join(str(error).split())[:MAX_REASON]
            raise ConfigError(f"this job cannot be traced: {type(error).__name__}: {text}") from error


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Keep warnings of the libraries about a run that never happens from the terminal."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
