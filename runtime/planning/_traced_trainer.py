"""Build the TRL trainer of a job on fake tensors. Called by `_trace.py`.

Where the model of a real run would differ on a GPU, it is built as it would be there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from grpo_run.runtime.planning.job import NAMED_OPTIMIZERS, TRACED_OPTIMIZERS, Job
from grpo_run.runtime.upstream import rollout_names
from grpo_run.runtime.upstream.patches import override_attributes
from grpo_run.runtime.upstream.trainer_kinds import TRAINERS
from grpo_run.runtime.upstream.versions import check_extra

_ROWS = 8
"""Rows of the dataset that the trainer is given; none of them is read."""
ATTENTION_DROPOUTS = ("attention_dropout", "attn_pdrop")
"""Names of the rate of attention dropout in configurations of transformers."""


def build(job: Job, config: Any, arguments: tuple[Any, Any, Any]) -> tuple[Any, Any]:
    """Return the trainer of a job, and the model that its reference log-probabilities come from, if it has
    one.

    Args:
        job: sizes and settings.
        config: of the model, with the layers that are traced.
        arguments: see `arguments_of`.
    """
    import trl

    args, dataset, tokenizer = arguments
    config = _kernel_config(job, config)
    with _adapters_can_be_moved():
        trainer = getattr(trl, TRAINERS[job.algorithm].name)(
            model=_model(job, config),
            args=args,
            train_dataset=dataset,
            processing_class=tokenizer,
            peft_config=adapters(job),
            **({"reward_funcs": _reward} if job.generates else {}),
        )
    trainer.accelerator.prepare_model(trainer.model, device_placement=False)  # as `train()` does
    _create_optimizer(job, trainer)
    setattr(trainer, rollout_names.ACCUMULATION, 1)
    set_checkpointing(trainer, enabled=job.checkpointing)  # a real trainer does it in `train()`
    if not job.reference:
        return trainer, None
    reference = trainer.model if job.lora_rank else _reference(job, config, trainer)
    trainer.beta = 1.0
    return trainer, reference


def set_checkpointing(trainer: Any, *, enabled: bool) -> None:
    """Turn gradient checkpointing of a trainer's model on or off."""
    if enabled:
        trainer.model.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs=trainer.args.gradient_checkpointing_kwargs
        )
    else:
        trainer.model.gradient_checkpointing_disable()


def _create_optimizer(job: Job, trainer: Any) -> None:
    if job.optimizer in NAMED_OPTIMIZERS:
        from grpo_run.runtime.planning._named_optimizers import NamedOptimizer

        trainer.optimizer = NamedOptimizer(trainer.model, *NAMED_OPTIMIZERS[job.optimizer])
        return
    trainer.create_optimizer()
    if job.optimizer == "adamw_torch" and job.device == "cuda":
        for group in trainer.optimizer.param_groups:
            group["foreach"] = True  # torch's choice for parameters on a GPU


@contextlib.contextmanager
def _adapters_can_be_moved() -> Iterator[None]:
    """Replace `Module.to`, with which peft gives adapters their type: it cannot swap fake parameters, and
    nothing has to be moved.
    """
    import torch

    def to(module: Any, *args: Any, dtype: Any = None, **kwargs: Any) -> Any:
        for owner in module.modules():
            for name, parameter in list(owner.named_parameters(recurse=False)):
                if dtype is not None and parameter.is_floating_point() and parameter.dtype != dtype:
                    changed = torch.nn.Parameter(parameter.detach().to(dtype), parameter.requires_grad)
                    setattr(owner, name, changed)
        return module

    with override_attributes(torch.nn.Module, to=to):
        yield


def _kernel_config(job: Job, config: Any) -> Any:
    """Return a configuration whose attention stores what the device's kernels store.

    The fused kernels of CUDA draw attention dropout again in backward. On a CPU, dropout excludes the fused
    kernel, and the attention matrix is stored.
    """
    if job.device == "cuda" and job.attention == "sdpa":
        text = config.get_text_config()
        for name in ATTENTION_DROPOUTS:
            if getattr(text, name, 0.0):
                setattr(text, name, 0.0)
    return config


def _model(job: Job, config: Any) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(
        config, dtype=getattr(torch, job.weights), attn_implementation=job.attention
    )
    model.to = lambda *args, **kwargs: model  # a fake model is where it is, and has its type
    return model


def adapters(job: Job) -> Any:
    """Return peft's configuration of a job's adapters; None without them.

    Raises:
        MissingPackageError: peft is not installed.
    """
    if not job.lora_rank:
        return None
    check_extra("the prediction of LoRA", "peft")
    from peft import LoraConfig

    targets: Any = list(job.lora_targets) or None
    return LoraConfig(
        r=job.lora_rank,
        lora_dropout=job.lora_dropout,
        target_modules="all-linear" if targets == ["all-linear"] else targets,
        task_type="CAUSAL_LM",
    )


def _reference(job: Job, config: Any, trainer: Any) -> Any:
    from trl.trainer.utils import add_fused_lm_head

    reference = _model(job, config).eval()
    add_fused_lm_head(reference, temperature=trainer.temperature)
    return reference


def arguments_of(job: Job, folder: str) -> tuple[Any, Any, Any]:
    """Return the trainer's configuration, dataset and tokenizer: all of them real, and tiny."""
    import trl
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    settings: dict[str, Any]
    if job.generates:
        settings = {"num_generations": 2, "max_completion_length": job.completion, "beta": 0.0}
        rows: dict[str, Any] = {"prompt": ["a"] * _ROWS}
    else:
        settings = {"max_length": job.completion, "dataset_kwargs": {"skip_prepare_dataset": True}}
        rows = {"input_ids": [[0, 0]] * _ROWS, "labels": [[0, 0]] * _ROWS}
    args = getattr(trl, TRAINERS[job.algorithm].configuration)(
        output_dir=folder,
        use_cpu=True,
        bf16=job.autocast,
        report_to=[],
        per_device_train_batch_size=2,
        gradient_checkpointing=job.checkpointing,
        max_steps=1,
        disable_tqdm=True,
        optim=job.optimizer if job.optimizer in TRACED_OPTIMIZERS else TRACED_OPTIMIZERS[0],
        **settings,
    )
    words = {"a": 0, "<unk>": 1, "<eos>": 2, "<pad>": 3}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="<unk>")),
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<unk>",
    )
    return args, Dataset.from_dict(rows), tokenizer


def _reward(completions: list[Any], **kwargs: Any) -> list[float]:
    raise AssertionError("a trace generates nothing")
