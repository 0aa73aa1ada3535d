"""The process that traces a run with several memory plans: reads a request, appends the peaks of each plan, exits.

Started by `runtime.supervision.memory.tracing`, which waits for it and kills it at its deadline. Uses no GPU.
"""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path

from grpo_run.runtime.continuity.memory.trace_request import (
    VARIABLE,
    TraceReply,
    TraceRequest,
    output_file,
    read_request,
    replies_file,
)
from grpo_run.runtime.errors import ConfigError
from grpo_run.runtime.processes.parent_death import die_with_parent
from grpo_run.trainers.planning.plans.job_of_run import job_of, model_config, other_parameters, refusals

NICENESS = 5
"""A third of the time of other programs on a busy machine. The run itself waits, so less would only make it wait longer."""
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
    """Lower the priority, bound the memory, and print into a file: the supervisor's terminal shows nothing of a trace."""
    output = _private(str(output_file(folder)), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.nice(NICENESS)
    with contextlib.suppress(OSError):  # a container may forbid it
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    with contextlib.suppress(OSError, ValueError):  # a lower limit is in force
        limit = _data_bytes() + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _data_bytes() -> int:
    """Return the private writable memory of this process.

    Raises:
        OSError, ValueError: the kernel does not say.
    """
    for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    raise ValueError("no VmData")


def answers(request: TraceRequest) -> Iterator[TraceReply]:
    """Yield the peaks of each plan, until one needs less, or why there are none."""
    facts = request.facts
    if reasons := list(refusals(facts)):
        yield TraceReply(refusal="; ".join(reasons))
        return
    import torch

    from grpo_run.trainers.planning.prediction import Predictor

    torch.set_num_threads(THREADS)
    try:
        predictor = Predictor(model_config(facts))
    except ConfigError as error:
        yield TraceReply(refusal=str(error))
        return
    below = request.below_bytes
    for job in request.jobs:
        try:
            prediction = predictor.predict(job_of(facts, job.sizes))
        except ConfigError as error:
            yield TraceReply(refusal=str(error))
            return
        if differs := other_parameters(facts, predictor.shape.parameters, prediction.trained_parameters):
            yield TraceReply(refusal=differs)
            return
        peaks = {phase: memory.allocated_bytes for phase, memory in prediction.phases.items()}
        yield TraceReply(plan=job.plan, peaks=peaks)
        peak = peaks.get(request.phase)
        if peak is None or (below is not None and peak < below):
            return
        below = peak if below is None else below
