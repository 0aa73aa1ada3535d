"""Diagnosis of a rank that has run out of memory: its sentence, its signature and the advice. Pure.

Called by `exits.py`. What is exhausted, and in which phase, is read from the exception (`watchdog.memory`).
What is changed before the next attempt is decided by the supervisor.
"""

from __future__ import annotations

from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.memory.error_patterns import ErrorSource
from grpo_run.watchdog.memory.shortage import OUTSIDE, MemoryPhase, Shortage

_PHASE_ADVICE = {
    MemoryPhase.generate: "Lower max_completion_length, generation_batch_size or vLLM's share of the GPU.",
    MemoryPhase.score: "Lower per_device_train_batch_size or max_completion_length.",
    MemoryPhase.forward: (
        "Lower per_device_train_batch_size or max_completion_length, or set gradient_checkpointing."
    ),
    MemoryPhase.backward: (
        "Lower per_device_train_batch_size or max_completion_length, or set gradient_checkpointing."
    ),
    MemoryPhase.optimizer: (
        "Shard the optimizer's state over more GPUs, offload it to the host, or take an optimizer with less"
        " state."
    ),
    MemoryPhase.save: "Save without gathering the whole model on one GPU.",
    MemoryPhase.load: "Shard the model over more GPUs, or load it in a smaller type.",
    MemoryPhase.evaluate: "Lower per_device_eval_batch_size, which no memory plan changes.",
    MemoryPhase.reward: (
        "Let the reward function use less memory of this GPU: smaller batches in it, or its model on the CPU"
        " or elsewhere."
    ),
    MemoryPhase.callback: (
        "Let the callback use less memory of this GPU: no graphs (torch.no_grad), and no tensors that it"
        " keeps."
    ),
    MemoryPhase.script: (
        "Let the script use less memory of this GPU at this line: smaller batches there, or what it keeps on"
        " the CPU."
    ),
}
_CAUSE_ADVICE = {
    Cause.host_oom: "Lower dataloader_num_workers, or give the job more host memory.",
    Cause.shm_full: "Enlarge /dev/shm (--shm-size of docker), or lower dataloader_num_workers.",
}
_HOST_CODE_ADVICE = "Let the code at this line use less memory of the host, or give the job more host memory."
_CACHE_ADVICE = "Raise vllm_gpu_memory_utilization, or lower vllm_max_model_length."
_FRAGMENTED = (
    "Memory is fragmented: PYTORCH_ALLOC_CONF=expandable_segments:True lets the allocator use what it has"
    " reserved."
)


def memory_sentence(shortage: Shortage, rank: int, place: str) -> str:
    """Return what has happened, as one sentence.

    Args:
        place: where the rank was, after a space.
    """
    own = ", in the script's own code" if shortage.phase is MemoryPhase.script else ""
    if shortage.line and shortage.phase in OUTSIDE:
        own = f"{own or ','} at {shortage.line.rpartition('/')[2]}"
    return f"Rank {rank} ran out of {shortage.memory}{place}{own}: {shortage.detail.rstrip('.')}."


def memory_signature(shortage: Shortage, step: int) -> str:
    """Return what identifies the failure: the same memory in the same phase of the same step, wherever it was
    allocated.
    """
    return f"{shortage.cause}:{shortage.phase}:step{step}"


def memory_advice(shortage: Shortage) -> tuple[str, ...]:
    """Return what a user can change."""
    if shortage.cause is Cause.host_oom and shortage.phase in OUTSIDE and shortage.line:
        return (_HOST_CODE_ADVICE,)
    if shortage.cause is not Cause.gpu_oom:
        return (_CAUSE_ADVICE[shortage.cause],)
    if shortage.source is ErrorSource.vllm_cache:
        return (_CACHE_ADVICE,)
    figures = shortage.figures
    fragmented = (figures.unallocated_bytes or 0) >= (figures.tried_bytes or 0) > 0
    advice = _PHASE_ADVICE.get(shortage.phase, "")
    return tuple(line for line in (_FRAGMENTED if fragmented else "", advice) if line)
