"""The memory trace at the points of a rank, under `--memory-trace`.

Imports no library: the hooks wait until the script does. Where it has neither a Trainer nor a loop, each
optimizer step counts as a step.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

import msgspec
import wrapt

from grpo_run.runtime.features.memory_trace.events import MemoryFound
from grpo_run.runtime.features.memory_trace.settings import MemoryTraceSettings
from grpo_run.runtime.rank.points import CallPoints, RankFeature
from grpo_run.runtime.rank.session import Session
from grpo_run.runtime.snapshots.headroom import memory_headroom
from grpo_run.watchdog.observation import RankState

if TYPE_CHECKING:
    from grpo_run.runtime.features.memory_trace._tracer import MemoryTrace


class MemoryTracePart(RankFeature):
    """The trace of this rank, if there is one."""

    name = MemoryTraceSettings.NAME
    _trace: MemoryTrace | None = None

    def script_begins(self, session: Session) -> None:
        """Begin to trace, under `--memory-trace`."""
        if not session.config.of(MemoryTraceSettings).enabled:
            return
        from grpo_run.runtime.features.memory_trace._tracer import MemoryTrace

        def report(found: MemoryFound) -> None:
            where = {"rank": session.rank, "step": session.slot.step, "world_size": session.world_size}
            session.journal.write(msgspec.structs.replace(found, **where))

        trace = self._trace = MemoryTrace(
            report,
            warn=session.warn if session.is_main else session.warn_in_journal,
            free_bytes=lambda device: _free_bytes(session, device),
        )

        def after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
            training = session.slot.state is RankState.training
            if session.own_steps and not training and not sys.modules["torch"].compiler.is_compiling():
                trace.step_ended(session.own_steps)

        os.register_at_fork(after_in_child=trace.end)
        wrapt.register_post_import_hook(
            lambda module: module.register_optimizer_step_post_hook(after_step), "torch.optim.optimizer"
        )

    def call(self, session: Session, points: CallPoints) -> None:
        """Look at what is alive after each step."""
        if (trace := self._trace) is not None:
            points.votes_begin.append(lambda step: trace.step_ended(step, session.slot.target_steps))


def _free_bytes(session: Session, device: str) -> int:
    """Return how much memory of a type of device this rank may still take; 0 if that is not known."""
    if device != "cpu":
        return max(0, session.device_memory.usable_bytes() - session.device_memory.sizes()[0])
    return min((one.free_bytes for one in memory_headroom()), default=0) // session.local_world_size


PART = MemoryTracePart()
