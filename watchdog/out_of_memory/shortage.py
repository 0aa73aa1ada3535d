"""Exhausted memory as one value: which memory, who reported it, the figures, and the phase that failed.

Made from a rank's exception, or from an exception that this one was raised from, or while it was handled. Becomes a part of
the verdict; read by the recovery policy, the journal, the terminal and the report. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.observation import Phase, RaisedError, RankError
from grpo_run.watchdog.out_of_memory.error_patterns import Source, recognize
from grpo_run.watchdog.out_of_memory.figures import Figures, read_figures
from grpo_run.watchdog.out_of_memory.phases import MemoryPhase, line_of, memory_phase
from grpo_run.watchdog.size_text import size_text

MEMORIES = {
    Cause.gpu_oom: "GPU memory",
    Cause.host_oom: "host memory",
    Cause.shm_full: "shared memory (/dev/shm)",
}

_QUOTING = (Phase.reward, Phase.callback)
"""Phases in which a script raises what a server has answered: the class must say that memory of the rank is exhausted."""
FULL_BYTES = 1024**2
"""A file system with less space is full: an allocator asks for pages in blocks of about this size."""
LEAST_GAIN = 0.1
"""Of a request. What is free when it fails differs by less from one attempt to the next without a reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shortage:
    """Memory that was exhausted in one rank.

    Args:
        cause: `gpu_oom`, `host_oom` or `shm_full`.
        source: what reported it.
        phase: that died.
        text: the line of the message that says so.
        figures: of the message.
        line: of the script that has asked for it, as `file:line`; empty if a trainer has, or if it is not known.
    """

    cause: Cause
    source: Source
    phase: MemoryPhase
    text: str
    figures: Figures = field(default_factory=Figures)
    line: str = ""

    @property
    def memory(self) -> str:
        """`GPU memory`, for sentences."""
        return MEMORIES[self.cause]

    @property
    def detail(self) -> str:
        """What was tried with how much free, or the message's own line."""
        if self.source is Source.nccl:
            return f"NCCL: {self.text}"
        return self.figures.request or self.text

    def repeats(self, before: Mapping[str, Any]) -> bool:
        """Whether this is an earlier request again, at the same line, with no more memory free for it.

        Args:
            before: `as_json` of the earlier one.
        """
        tried, earlier = self.figures, Figures.from_json(before)
        if not self.line or (before.get("line"), before.get("phase")) != (self.line, str(self.phase)):
            return False
        if tried.tried_bytes is None:
            return False
        gained = (tried.free_bytes or 0) - (earlier.free_bytes or 0)
        return tried.tried_bytes == earlier.tried_bytes and gained < LEAST_GAIN * tried.tried_bytes

    def as_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "memory": self.memory,
            "source": str(self.source),
            "phase": str(self.phase),
            "line": self.line,
            "text": self.text,
            **self.figures.as_json(),
        }


def shortage_of(error: RankError | None, phases: Sequence[Phase] | None) -> Shortage | None:
    """Return the exhausted memory that an exception reports; None if it reports something else.

    Args:
        error: that ended the rank; None if it left none.
        phases: of the rank on the board, the outermost first, for an exception that has left none.
    """
    if error is None:
        return None
    for raised in error.chain or (_itself(error),):
        spelling = recognize(raised.types, raised.message)
        if spelling is not None:
            open_phases = next(
                (one for one in (raised.phases, error.phases, phases) if one is not None), None
            )
            if raised.by_script and not spelling.by_class and open_phases and open_phases[-1] in _QUOTING:
                continue
            phase = memory_phase(open_phases, error.traceback, error.location)
            return Shortage(
                cause=spelling.cause,
                source=spelling.source,
                phase=phase,
                text=spelling.text,
                figures=read_figures(raised.message),
                line=line_of(phase, error.traceback, error.location),
            )
    return None


def shortage_of_bus_error(free_bytes: int | None, phases: Sequence[Phase] | None) -> Shortage | None:
    """Return the shortage of a rank that was killed by SIGBUS, which a write into a full /dev/shm causes.

    Args:
        free_bytes: space in /dev/shm after the exit; None if it is not known.
        phases: of the rank on the board, the outermost first.
    """
    if free_bytes is None or free_bytes >= FULL_BYTES:
        return None
    return Shortage(
        cause=Cause.shm_full,
        source=Source.shared_memory,
        phase=memory_phase(phases, ""),
        text=f"it was killed by SIGBUS, and /dev/shm has {size_text(free_bytes)} left",
    )


def usage_in(verdict: Mapping[str, Any]) -> str:
    """Return what was in use, from the contents of a `verdict.json`; empty if that is not known."""
    shortage = verdict.get("shortage")
    return Figures.from_json(shortage).usage if isinstance(shortage, Mapping) else ""


def described_in(verdict: Mapping[str, Any]) -> str:
    """Return what was exhausted, from the contents of a `verdict.json`, for its page; empty if nothing was."""
    shortage = verdict.get("shortage")
    if not isinstance(shortage, Mapping):
        return ""
    figures = Figures.from_json(shortage)
    where = f"{shortage.get('memory')}, phase {shortage.get('phase')}, reported by {shortage.get('source')}"
    return "; ".join(part for part in (where, figures.request, figures.usage) if part)


def _itself(error: RankError) -> RaisedError:
    """The exception as the only one of its chain, for an error file without one."""
    return RaisedError(
        types=(f"builtins.{error.type}", *error.bases), message=error.message, phases=error.phases
    )
