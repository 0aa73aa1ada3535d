"""The process that traces a run with several memory plans, after an out-of-memory error.

It reads a request, derives the job from the facts that the ranks have published, appends the peaks of each
plan, and exits. `refusals` says why some runs cannot be traced. Started by
`runtime/supervisor/memory/tracing.py`, which waits for it and kills it at its deadline. Loads no weights
and uses no GPU.
"""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from grpo_run.runtime.errors import ConfigError
from grpo_run.runtime.memory.facts import MemoryFacts
from grpo_run.runtime.memory.files import (
    VARIABLE,
    TraceReply,
    TraceRequest,
    output_file,
    read_request,
    replies_file,
)
from grpo_run.runtime.memory.plan import MemoryPlan
from grpo_run.runtime.planning.job import (
    ALGORITHMS,
    ATTENTIONS,
    COMPLETION_TOKENS,
    DTYPE_BYTES,
    OPTIMIZERS,
    PROMPT_TOKENS,
    Job,
)
from grpo_run.runtime.planning.model_config import build_config
from grpo_run.runtime.processes.starting import die_with_parent

LAYOUTS = {
    "ddp": "ddp", "deepspeed-zero2": "zero2", "deepspeed-zero3": "zero3", "fsdp1": "fsdp", "fsdp2": "fsdp",
}  # fmt: skip
"""Layouts of a manifest, and the job's names for them."""
AUTOCAST = ("", "bfloat16")
DEVICES = ("cuda", "cpu")
OTHER_PARAMETERS = 0.01
"""Share of the parameters by which the model may differ from what its configuration describes."""


def refusals(facts: MemoryFacts) -> Iterator[str]:
    """Yield why a run cannot be traced, each as a clause; nothing if it can."""
    computation = facts.computation
    if facts.trainer not in ALGORITHMS:
        yield f"{facts.trainer_class} is not traced, only GRPO, RLOO and SFT are"
    if facts.trainer == "sft" and facts.max_length is None:
        yield "its rows have no longest length"
    if facts.overridden:
        yield f"{facts.trainer_class} has its own {', '.join(facts.overridden)}"
    if not computation.configuration:
        yield "the model has no configuration of transformers"
    if facts.trainable_parameters != facts.parameters and not computation.lora_rank:
        yield "not all parameters are trained"
    yield from computation.special
    for name, value, known in (
        ("data type", computation.weights, tuple(DTYPE_BYTES)),
        ("data type of autocast", computation.autocast, AUTOCAST),
        ("attention", computation.attention, ATTENTIONS),
        ("optimizer", computation.optimizer, OPTIMIZERS),
        ("device", computation.device, DEVICES),
        ("layout", facts.layout, tuple(LAYOUTS)),
    ):
        if value not in known:
            yield f"the {name} {value!r} is not traced"
    if facts.optimizer_offload:
        yield "the optimizer's state is in host memory"


def job_of(facts: MemoryFacts, plan: MemoryPlan) -> Job:
    """Return the job of a run with a plan.

    Args:
        facts: of the run, without refusals.
    """
    computation = facts.computation
    steps = facts.steps_per_generation or facts.gradient_accumulation_steps
    rollout_steps = steps * (facts.num_iterations or 1)
    adapted, reinforced = computation.lora_rank > 0, facts.trainer != "sft"
    completion = plan.max_completion_length or facts.max_completion_length
    longest = completion if reinforced else facts.max_length
    rescored = (
        facts.trainer == "rloo"
        or facts.generates.startswith("vllm")
        or facts.gradient_accumulation_steps % rollout_steps != 0
    )
    return Job(
        batch=facts.micro_batch(plan),
        prompt=PROMPT_TOKENS if reinforced else 0,
        completion=longest or COMPLETION_TOKENS,
        weights=computation.weights,
        autocast=bool(computation.autocast),
        checkpointing=facts.gradient_checkpointing or plan.gradient_checkpointing,
        optimizer=computation.optimizer,
        # under adapters the reference is the model without them
        reference=reinforced and (facts.reference_model or (adapted and facts.beta != 0.0)),
        rescored=reinforced and rescored,
        accumulation=2 if facts.gradient_accumulation_steps * facts.divisor(plan) > 1 else 1,
        ranks=facts.world_size,
        layout=LAYOUTS[facts.layout],
        attention=computation.attention,
        device=computation.device,
        algorithm=facts.trainer,
        lora_rank=computation.lora_rank,
        lora_targets=computation.lora_targets,
        lora_dropout=computation.lora_dropout,
    )


def other_parameters(facts: MemoryFacts, described: int, trained: int) -> str:
    """Return that a run has other parameters than were traced, as a clause; empty if it has them.

    Args:
        facts: of the run.
        described: parameters of the model that its configuration describes.
        trained: parameters that were trained in the trace.
    """
    pairs = [("", facts.parameters, described)]
    if facts.computation.lora_rank:
        pairs = [
            ("below its adapters", facts.parameters - facts.trainable_parameters, described),
            ("in its adapters", facts.trainable_parameters, trained),
        ]
    for where, real, found in pairs:
        if abs(found - real) > OTHER_PARAMETERS * real:
            return (
                f"the model has {real} parameters{where and ' ' + where}, its configuration describes {found}"
            )
    return ""


def model_config(facts: MemoryFacts) -> Any:
    """Return transformers' configuration of the run's model.

    Raises:
        ConfigError: it is that of no model that transformers has.
    """
    values = facts.computation.configuration
    if not isinstance(values.get("model_type"), str):
        raise ConfigError("the model's configuration has no model_type")
    return build_config(values, "the model's configuration")


NICENESS = 5
"""A third of the time of other programs on a busy machine. The run itself waits, so less would only make it
wait longer.
"""
MEMORY_BYTES = 2 << 30
"""What it may use beside what the interpreter has. Fake tensors need about 100 MiB."""
THREADS = 1


def main() -> None:
    """Serve one request."""
    die_with_parent(os.getppid())
    folder = Path(os.environ[VARIABLE])
    _confine(folder)
    request = read_request(folder)
    with open(replies_file(folder), "x", encoding="ascii", opener=_private) as replies:
        for reply in answers(request):
            replies.write(reply.model_dump_json() + "\n")
            replies.flush()


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def _confine(folder: Path) -> None:
    """Lower the priority, bound the memory, and print into a file: the supervisor's terminal shows nothing of
    a trace.
    """
    output = _private(str(output_file(folder)), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.nice(NICENESS)
    with contextlib.suppress(OSError):  # a container may forbid it
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    with contextlib.suppress(OSError, ValueError):  # a lower limit is in force
        data_pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[5])
        limit = data_pages * resource.getpagesize() + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def answers(request: TraceRequest) -> Iterator[TraceReply]:
    """Yield the peaks of each plan, until one needs less, or why there are none."""
    facts = request.facts
    if reasons := list(refusals(facts)):
        yield TraceReply(refusal="; ".join(reasons))
        return
    import torch

    from grpo_run.runtime.planning.prediction import Predictor

    torch.set_num_threads(THREADS)
    try:
        predictor = Predictor(model_config(facts))
    except ConfigError as error:
        yield TraceReply(refusal=str(error))
        return
    below = request.below_bytes
    for plan in request.plans:
        try:
            prediction = predictor.predict(job_of(facts, plan))
        except ConfigError as error:
            yield TraceReply(refusal=str(error))
            return
        if differs := other_parameters(facts, predictor.shape.parameters, prediction.trained_parameters):
            yield TraceReply(refusal=differs)
            return
        peaks = {phase: memory.allocated_bytes for phase, memory in prediction.phases.items()}
        yield TraceReply(plan=plan, peaks=peaks)
        peak = peaks.get(request.phase)
        if peak is None or (below is not None and peak < below):
            return
        below = peak if below is None else below
