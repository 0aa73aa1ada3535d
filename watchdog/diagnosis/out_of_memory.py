"""Diagnosis of a rank that has run out of memory: its sentence, its signature and the advice. Pure; called by `exits.py`.

What is exhausted, and in which phase, is read from the exception (`watchdog.out_of_memory`). What is changed before
the next attempt is decided by the supervisor.
"""

from __future__ import annotations

from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.out_of_memory.phases import MemoryPhase
from grpo_run.watchdog.out_of_memory.shortage import Shortage
from grpo_run.watchdog.out_of_memory.spellings import Source

_PHASE_ADVICE = {
    MemoryPhase.generate: "Lower num_generations, max_completion_length or vLLM's share of the GPU.",
    MemoryPhase.score: "Lower per_device_train_batch_size or max_completion_length.",
    MemoryPhase.forward: "Lower per_device_train_batch_size or max_completion_length, or set gradient_checkpointing.",
    MemoryPhase.backward: "Lower per_device_train_batch_size or max_completion_length, or set gradient_checkpointing.",
    MemoryPhase.optimizer: "Shard the optimizer's state over more GPUs, or offload it to the host.",
    MemoryPhase.load: "Shard the model over more GPUs, or load it in a smaller type.",
}
_CAUSE_ADVICE = {
    Cause.host_oom: "Lower dataloader_num_workers, or give the job more host memory.",
    Cause.shm_full: "Enlarge /dev/shm (--shm-size of docker), or lower dataloader_num_workers.",
}
_CACHE_ADVICE = "Raise vllm_gpu_memory_utilization, or lower vllm_max_model_length."
_FRAGMENTED = "Memory is fragmented: PYTORCH_ALLOC_CONF=expandable_segments:True lets the allocator use what it has reserved."


def memory_sentence(shortage: Shortage, rank: int, place: str) -> str:
    """Return what has happened, as one sentence.

    Args:
        place: where the rank was, after a space.
    """
    return f"Rank {rank} ran out of {shortage.memory}{place}: {shortage.detail.rstrip('.')}."


def memory_signature(shortage: Shortage, step: int) -> str:
    """Return what identifies the failure: the same memory in the same phase of the same step, wherever it was allocated."""
    return f"{shortage.cause}:{shortage.phase}:step{step}"


def memory_advice(shortage: Shortage) -> tuple[str, ...]:
    """Return what a user can change."""
    if shortage.cause is not Cause.gpu_oom:
        return (_CAUSE_ADVICE[shortage.cause],)
    if shortage.source is Source.vllm_cache:
        return (_CACHE_ADVICE,)
    figures = shortage.figures
    fragmented = (figures.unallocated_bytes or 0) >= (figures.tried_bytes or 0) > 0
    advice = _PHASE_ADVICE.get(shortage.phase, "")
    return tuple(line for line in (_FRAGMENTED if fragmented else "", advice) if line)
