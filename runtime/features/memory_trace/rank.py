"""The memory trace at the points of a rank, under `--memory-trace`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from grpo_run.runtime.features.memory_trace.events import MemoryFound
from grpo_run.runtime.features.memory_trace.settings import MemoryTraceSettings
from grpo_run.runtime.rank.points import CallPoints, RankFeature
from grpo_run.runtime.rank.session import Session

if TYPE_CHECKING:
    from grpo_run.runtime.features.memory_trace._tracer import MemoryTrace


class MemoryTracePart(RankFeature):
    """The trace of this rank, if there is one."""

    name = MemoryTraceSettings.NAME
    _trace: MemoryTrace | None = None

    def call(self, session: Session, points: CallPoints) -> None:
        """Look at what is alive after each step, under `--memory-trace`."""
        if not session.config.of(MemoryTraceSettings).enabled:
            return
        from grpo_run.runtime.features.memory_trace._tracer import MemoryTrace

        def report(found: MemoryFound) -> None:
            where = {"rank": session.rank, "step": session.slot.step, "world_size": session.world_size}
            session.journal.write(msgspec.structs.replace(found, **where))

        self._trace = self._trace or MemoryTrace(report, session.show_warning)
        points.votes_begin.append(self._trace.step_ended)


PART = MemoryTracePart()
