"""What the closed form needs to know of a job, as a check of what was traced.

Called by `prediction.py` and `terms.py`. The closed form itself is in `runtime.continuity.memory.closed_form`. Pure.
"""

from __future__ import annotations

from grpo_run.runtime.continuity.memory.closed_form import Sizes
from grpo_run.trainers.planning.job import DTYPE_BYTES, NAMED_OPTIMIZERS, Job
from grpo_run.trainers.planning.model_config import Shape

SUSPICIOUS = 1.5
"""Ratio of trace and closed form, either way, above which the output says that they disagree."""
STATES = {"adamw_torch_fused": 2, "adamw_torch": 2, "adafactor": 0, "sgd": 0}
"""Tensors of the weights' size that an optimizer keeps."""
ADAPTER_BYTES = 4
"""peft keeps adapters in fp32."""


def sizes_of(job: Job, shape: Shape, trained: int) -> Sizes:
    """Return the sizes of a job on one rank.

    Args:
        job: sizes and settings.
        shape: of the model.
        trained: how many parameters are trained: all of them, or those of adapters, which are kept in fp32.
    """
    fully = job.ranks if job.layout in ("zero3", "fsdp") else 1
    partly = job.ranks if job.layout == "zero2" else fully
    width = DTYPE_BYTES[job.weights]
    if job.lora_rank:
        trained = trained * ADAPTER_BYTES // width  # counted in values of the weights' type
    return Sizes(
        parameters=shape.parameters + (trained if job.lora_rank else 0),
        trained=trained,
        value_bytes=width,
        autocast=job.autocast,
        reference=job.reference and not job.lora_rank,
        optimizer_states=_states(job, width),
        whole_update=job.optimizer == "adamw_torch",
        weight_shards=fully,
        gradient_shards=partly,
        optimizer_shards=partly,
        layers=shape.layers,
        hidden=shape.hidden,
        heads=shape.heads,
        key_value_heads=shape.key_value_heads,
        head_size=shape.head_size,
        intermediate=shape.intermediate,
        vocabulary=shape.vocabulary,
        rows=job.batch,
        row_tokens=job.length,
        scored_tokens=job.completion,
        checkpointing=job.checkpointing,
        accumulates=job.accumulation > 1,
        generated_rows=job.batch * job.rollout_batches if job.transformers_generates else 0,
        on_gpu=job.device == "cuda",
    )


def _states(job: Job, width: int) -> float:
    if job.optimizer in NAMED_OPTIMIZERS:
        count, state_width = NAMED_OPTIMIZERS[job.optimizer]
        return count * state_width / width
    if job.deepspeed:
        return STATES[job.optimizer] * 4 / width
    return STATES[job.optimizer]
