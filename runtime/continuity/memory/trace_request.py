"""Request and answer of the process that traces plans after an out-of-memory error: two files in the run directory.

    <run>/plan_traces/request.json   written by the supervisor (`runtime.supervision.memory.tracing`)
    <run>/plan_traces/peaks.jsonl    a line per plan, appended by the process (`grpo_run.trainers.planning.plans`)
    <run>/plan_traces/output.log     what the process prints

The supervisor imports no torch, so it cannot trace. Plain data and its files.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pydantic

from grpo_run.runtime.continuity.memory.closed_form import Sizes
from grpo_run.runtime.continuity.memory_facts import MemoryFacts
from grpo_run.runtime.continuity.memory_plan import MemoryPlan
from grpo_run.runtime.files import write_json

FOLDER = "plan_traces"
"""In the run directory."""
VARIABLE = "GRPO_RUN_PLAN_TRACES"
"""Names the folder to the process."""
MAX_BYTES = 4 << 20
"""Far above the size of any such file. A larger one is not read."""


class _Message(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")


class TracedJob(_Message):
    """A plan, and the sizes of the run with it."""

    plan: MemoryPlan
    sizes: Sizes


class TraceRequest(_Message):
    """What is traced, in this order, until a plan needs less in the phase than the first one."""

    facts: MemoryFacts
    jobs: tuple[TracedJob, ...] = pydantic.Field(min_length=1)
    phase: str
    below_bytes: float | None = None
    """The peak to be lowered, if it is known; else it is that of the first job."""


class TraceReply(_Message):
    """The peaks of one plan, or why there are none and nothing follows."""

    plan: MemoryPlan | None = None
    peaks: dict[str, float] = {}
    """By phase, in bytes of torch's allocator."""
    refusal: str = ""
    """As a clause."""


def write_request(folder: Path, request: TraceRequest) -> None:
    """Write a request into an empty folder.

    Raises:
        OSError: the file cannot be written.
    """
    write_json(folder / "request.json", request.model_dump(mode="json"), durable=False)


def read_request(folder: Path) -> TraceRequest:
    """Return the request in a folder.

    Raises:
        OSError, ValueError: it cannot be read.
    """
    return TraceRequest.model_validate(json.loads((folder / "request.json").read_bytes()))


def replies_file(folder: Path) -> Path:
    """Return the file of the replies."""
    return folder / "peaks.jsonl"


def output_file(folder: Path) -> Path:
    """Return the file of what the process prints."""
    return folder / "output.log"


def read_replies(folder: Path) -> list[TraceReply]:
    """Return the replies that have been written so far; a line that was not finished is left out."""
    path, replies = replies_file(folder), []
    try:
        if path.stat().st_size > MAX_BYTES:
            return []
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    for line in lines:
        try:
            reply = TraceReply.model_validate_json(line)
        except ValueError:  # pydantic's error is one
            break
        if all(math.isfinite(size) and size >= 0 for size in reply.peaks.values()):
            replies.append(reply)
    return replies
