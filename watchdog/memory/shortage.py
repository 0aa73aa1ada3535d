"""Exhausted memory as one value: which memory, who reported it, the figures, and the failed phase.

`shortage_of` reads it from a rank's exception, or from one that it was raised from or while handling. The
phase is finer than on the board, where forward and backward passes are one phase and a hand-written loop
marks generation as a part of it: the traceback tells them apart by functions of torch, transformers and
DeepSpeed and by the lines that call them. It also tells the script's own code from a trainer's, by which of
them has the innermost frame. The result is part of the verdict; the recovery policy, the
journal, the terminal and the report read it. Does not decide which rank is the culprit. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.memory.error_patterns import ErrorSource, recognize
from grpo_run.watchdog.observation import Phase, RaisedError, RankError
from grpo_run.watchdog.text import TextEnum, size_text

_UNITS = {"bytes": 1, "byte": 1, "b": 1}
_UNITS |= {f"{prefix}ib": 1024 ** (power + 1) for power, prefix in enumerate("kmgt")}
_UNITS |= {f"{prefix}b": 1000 ** (power + 1) for power, prefix in enumerate("kmgt")}
_SIZE = r"(?P<number>\d+(?:\.\d+)?) ?(?P<unit>[KMGT]i?B|bytes?|B)\b"
_PATTERNS = {
    "tried_bytes": (rf"\btried to allocate {_SIZE}", rf"\bUnable to allocate {_SIZE}",
    rf"\bFailed to CUDA [\w ]+ {_SIZE}",
                    r"\bOut of memory allocating (?P<number>[\d,]+) (?P<unit>bytes)"),
    "free_bytes": (rf"\bof which {_SIZE} is free",),
    "capacity_bytes": (rf"\btotal capacity of {_SIZE}",),
    "in_use_bytes": (rf"\bthis process has {_SIZE} memory in use",),
    "allocated_bytes": (rf"\bOf the allocated memory {_SIZE} is allocated by",),
    "unallocated_bytes": (rf"\band {_SIZE} is reserved by \w+ but unallocated",),
}  # fmt: skip
_COMPILED = {
    name: tuple(re.compile(pattern, re.IGNORECASE) for pattern in patterns)
    for name, patterns in _PATTERNS.items()
}
_VLLM_FREE = re.compile(
    r"Free memory on device[^(\n]*\((?P<free>\d+(?:\.\d+)?)/(?P<total>\d+(?:\.\d+)?) GiB\)", re.IGNORECASE
)
_GIB = 1024**3


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """Sizes of a message, in bytes; None for one that it does not have.

    Args:
        tried_bytes: the allocation that failed.
        free_bytes, capacity_bytes: of the device.
        in_use_bytes: by the process, torch and others.
        allocated_bytes: by tensors, in torch's allocator.
        unallocated_bytes: reserved by torch's allocator, and not allocated.
    """

    tried_bytes: int | None = None
    free_bytes: int | None = None
    capacity_bytes: int | None = None
    in_use_bytes: int | None = None
    allocated_bytes: int | None = None
    unallocated_bytes: int | None = None

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Figures:
        """Read the fields as plain JSON values; anything but a number is None."""
        known = {field.name: value.get(field.name) for field in fields(cls)}
        return cls(**{name: one if isinstance(one, int) else None for name, one in known.items()})

    @property
    def request(self) -> str:
        """`tried to allocate 2.0 GiB with 512 MiB of 79.2 GiB free`; empty if nothing of it is known."""
        parts = []
        if self.tried_bytes is not None:
            parts.append(f"tried to allocate {size_text(self.tried_bytes)}")
        if self.free_bytes is not None:
            total = f" of {size_text(self.capacity_bytes)}" if self.capacity_bytes is not None else ""
            parts.append(f"{'with ' if parts else ''}{size_text(self.free_bytes)}{total} free")
        return " ".join(parts)

    @property
    def usage(self) -> str:
        """`71.3 GiB allocated, 5.3 GiB reserved and not allocated, …`; empty if nothing of it is known."""
        known = {
            "allocated by tensors": self.allocated_bytes,
            "reserved and not allocated": self.unallocated_bytes,
            "in use by the process": self.in_use_bytes,
        }
        return ", ".join(f"{size_text(count)} {what}" for what, count in known.items() if count is not None)


def read_figures(message: str) -> Figures:
    """Return the figures of a message."""
    found = {name: _first(patterns, message) for name, patterns in _COMPILED.items()}
    engine = _VLLM_FREE.search(message)
    if engine is not None:
        found["free_bytes"] = round(float(engine["free"]) * _GIB)
        found["capacity_bytes"] = round(float(engine["total"]) * _GIB)
    return Figures(**found)


def _first(patterns: tuple[re.Pattern[str], ...], message: str) -> int | None:
    for pattern in patterns:
        found = pattern.search(message)
        if found is not None:
            return round(float(found["number"].replace(",", "")) * _UNITS[found["unit"].lower()])
    return None


class MemoryPhase(TextEnum):
    """What a rank was doing when memory was exhausted, as far as it decides what can lower the peak."""

    generate = "generate"
    """Generation of completions, also by vLLM in the rank, and sending it the weights."""
    score = "score"
    """What TRL computes of a rollout without gradients, such as log-probabilities."""
    forward = "forward"
    backward = "backward"
    optimizer = "optimizer"
    """The optimizer's step, and the clipping of gradients before it."""
    save = "save"
    load = "load"
    """Everything before the first step: weights, optimizer, checkpoint."""
    evaluate = "evaluate"
    """An evaluation, whose batches no plan changes."""
    reward = "reward"
    callback = "callback"
    script = "script"
    """The script's own code with no phase of a trainer open, in its data, or in what it has put in the place
    of `generate`.
    """
    unknown = "unknown"
    """Anything else, such as data that a library prepares."""


OUTSIDE = frozenset({MemoryPhase.reward, MemoryPhase.callback, MemoryPhase.script, MemoryPhase.unknown})
"""Where no size of a trainer decides what is allocated, so that a plan can only leave more memory free."""

_FRAME = re.compile(
    r'^ *File "(?P<file>[^"\n]*)", line (?P<line>\d+), in (?P<function>\S+)$(?:\n(?! *File'
    r' ")(?P<source>.*)$)?',
    re.MULTILINE,
)
"""A frame of a module that is frozen or gone has no source line."""
_Markers = tuple[tuple[MemoryPhase, str, str, str], ...]
_LOADING: _Markers = (
    (MemoryPhase.load, r"", r"load_state_dict|from_pretrained|_load_\w+|load_checkpoint",
    r"\bload_state_dict\("),
    (MemoryPhase.load, r"/torch/nn/modules/module\.py$", r"to|cuda|_apply", r""),
)  # fmt: skip
_OF_STEPS: _Markers = (
    (MemoryPhase.backward, r"", r"backward|_engine_run_backward", r"\.backward\(|\bautograd\.grad\("),
    (MemoryPhase.optimizer,
    r"/torch/optim/|/torch/nn/utils/clip_grad\.py$|/bitsandbytes/optim/|/deepspeed/ops/adam/", r".*", r""),
    (MemoryPhase.optimizer, r"/deepspeed/runtime/", r"step|_take_model_step", r""),
    (MemoryPhase.optimizer, r"", r"", r"\boptimizer\w*\.step\(|\bclip_grad_(?:norm|value)_?\("),
    (MemoryPhase.generate, r"/vllm/", r".*", r""),
    (MemoryPhase.generate, r"/transformers/generation/", r".*", r""),
    (MemoryPhase.generate, r"", r"_?generate", r"\.generate\("),
)  # fmt: skip
"""Phase, and patterns of a file, of a function in such a file, and of a line that calls it; "" matches no
line or function. A frame shows the phase if file and function match, or its line does.
"""
_GENERATION = re.compile(r'^ *File "[^"\n]*/(?:transformers/generation|vllm)/', re.MULTILINE)
_OF_TRAINER = re.compile(r"/(?:trl|accelerate|deepspeed|vllm)/|/transformers/trainer")

Place = tuple[str, int, str]
"""File, line and function of the innermost frame outside installed libraries."""


def memory_phase(
    phases: Sequence[Phase] | None, traceback: str, location: Place | None = None
) -> MemoryPhase:
    """Return in which phase memory was exhausted.

    Args:
        phases: that were open, the outermost first; None if the rank has marked none.
        traceback: of the exception, as Python prints it.
        location: of the exception in the script; None if it is not known.
    """
    innermost = phases[-1] if phases else None
    scripts = location is not None and _called_by_no_trainer(traceback, location)
    match innermost:
        case Phase.generate | Phase.weight_sync:
            # a part of a call of transformers' `generate` is smaller, and what the script does around it is
            # not
            return (
                MemoryPhase.script if scripts and not _GENERATION.search(traceback) else MemoryPhase.generate
            )
        case Phase.reward:
            return MemoryPhase.reward
        case Phase.callback:
            return MemoryPhase.callback
    if phases and Phase.eval in phases:
        return MemoryPhase.evaluate
    match innermost:
        case Phase.score:
            return MemoryPhase.score
        case Phase.forward_backward:
            return _innermost_shown(traceback, _OF_STEPS) or MemoryPhase.forward
        case Phase.optimizer:
            return _innermost_shown(traceback, _OF_STEPS) or MemoryPhase.optimizer
        case Phase.checkpoint:
            return _innermost_shown(traceback, _LOADING) or MemoryPhase.save
        case Phase.startup | Phase.idle:
            shown = _innermost_shown(traceback, _LOADING)
            return shown or (MemoryPhase.script if scripts else MemoryPhase.load)
        case _:
            return MemoryPhase.script if scripts else MemoryPhase.unknown


def line_of(phase: MemoryPhase, traceback: str, location: Place | None) -> str:
    """Return the line of the script that has asked for the memory, `file:line`; empty if a trainer has asked
    for it.

    One line of a trainer allocates for many layers, so that it may fail again although a change has helped.
    """
    if location is None:
        return ""
    innermost = next(reversed(list(_FRAME.finditer(traceback))), None)
    own = innermost is not None and (innermost["file"], int(innermost["line"])) == location[:2]
    return f"{location[0]}:{location[1]}" if own or phase in OUTSIDE else ""


def _called_by_no_trainer(traceback: str, location: Place) -> bool:
    """Whether no frame of a trainer is inside the script's innermost frame."""
    found = False
    for frame in _FRAME.finditer(traceback):
        if (frame["file"], int(frame["line"])) == location[:2]:
            found = True
        elif _OF_TRAINER.search(frame["file"]):
            found = False
    return found


def _innermost_shown(traceback: str, markers: _Markers) -> MemoryPhase | None:
    """The phase that the innermost telling frame shows."""
    found = None
    for frame in _FRAME.finditer(traceback):
        for phase, file, function, source in markers:
            in_file = (
                function and re.search(file, frame["file"]) and re.fullmatch(function, frame["function"])
            )
            if in_file or (source and re.search(source, frame["source"] or "")):
                found = phase
                break
    return found


MEMORIES = {
    Cause.gpu_oom: "GPU memory",
    Cause.host_oom: "host memory",
    Cause.shm_full: "shared memory (/dev/shm)",
}

_QUOTING = (Phase.reward, Phase.callback)
"""Phases in which a script raises what a server has answered: the class, or torch's allocator for the host,
must say that memory of the rank is exhausted.
"""
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
        line: of the script that has asked for it, as `file:line`; empty if a trainer has, or if it is not
            known.
    """

    cause: Cause
    source: ErrorSource
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
        if self.source is ErrorSource.nccl:
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
            **asdict(self.figures),
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
            if raised.by_script and not spelling.is_own and open_phases and open_phases[-1] in _QUOTING:
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
        source=ErrorSource.shared_memory,
        phase=memory_phase(phases, ""),
        text=f"it was killed by SIGBUS, and /dev/shm has {size_text(free_bytes)} left",
    )


def usage_in(verdict: Mapping[str, Any]) -> str:
    """Return what was in use, from the contents of a `verdict.json`; empty if that is not known."""
    shortage = verdict.get("shortage")
    return Figures.from_json(shortage).usage if isinstance(shortage, Mapping) else ""


def described_in(verdict: Mapping[str, Any]) -> str:
    """Return what was exhausted, from the contents of a `verdict.json`, for its page; empty if nothing
    was.
    """
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
