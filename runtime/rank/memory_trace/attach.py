"""Attaches a memory trace to a rank: to optimizer steps of a script without a Trainer and loop, and to the calls of models.

Called by the session under `--memory-trace`, before the script runs. Imports no library: the hooks wait until the script does.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import wrapt

from grpo_run.runtime.history.memory_findings import NOTICE
from grpo_run.runtime.rank.memory_trace.allocator_history import AllocatorHistory
from grpo_run.runtime.rank.memory_trace.finding import TraceFinding, sentence, subject
from grpo_run.runtime.rank.memory_trace.tracer import MemoryTrace


def trace_memory(
    write: Callable[..., object],
    trains_alone: Callable[[], int | None],
    *,
    history: AllocatorHistory,
    warn: Callable[[str], None],
    free_bytes: Callable[[str], int],
) -> MemoryTrace:
    """Begin to trace the memory of this process.

    Args:
        write: takes the fields of a `memory_finding` event.
        trains_alone: returns how many optimizer steps the script has taken with no Trainer and no loop; None inside one.
        history: of the CUDA allocator.
        warn: called with one line if the trace itself fails, and ends.
        free_bytes: returns how much memory of a type of device this rank may still take; 0 if that is not known.
    """
    directory = os.getcwd()

    def report(finding: TraceFinding) -> None:
        write(
            key=finding.key,
            subject=subject(finding, directory),
            sentence=sentence(finding, directory),
            **finding.as_json(),
        )
        if finding.kind != NOTICE:  # the only snapshot of a finding is for an alarm
            history.found()

    trace = MemoryTrace(report, history, warn, free_bytes)
    trace.begin()

    def watch_steps(module: Any) -> None:
        def after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
            steps = trains_alone()
            if steps is not None and not sys.modules["torch"].compiler.is_compiling():
                trace.step_ended(steps)

        module.register_optimizer_step_post_hook(after_step)

    wrapt.register_post_import_hook(watch_steps, "torch.optim.optimizer")
    wrapt.register_post_import_hook(
        lambda module: trace.padding.watch(module.PreTrainedModel), "transformers.modeling_utils"
    )
    return trace
