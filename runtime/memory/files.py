"""Files about memory in the run directory: facts of a call, and requests for traces.

    memory_facts.json         facts of a `train()` call, written by ranks, read by the supervisor
    plan_traces/request.json  written by the supervisor, which does not load TRL itself
    plan_traces/peaks.jsonl   a line per plan, appended by the tracing process
    plan_traces/output.log    what that process prints

Traces are requested by `runtime/supervisor/memory/tracing.py` and made by
`runtime/planning/plan_worker.py`. Predicts and decides nothing.
"""

from __future__ import annotations

from pathlib import Path

import pydantic

from grpo_run.runtime.files import write_json
from grpo_run.runtime.memory.facts import MemoryFacts
from grpo_run.runtime.memory.plan import MemoryPlan

FILE_NAME = "memory_facts.json"
"""Name of the file in the run directory."""


def write_facts(run_directory: Path, facts: MemoryFacts) -> None:
    """Write the facts, atomically and with mode 0600.

    Raises:
        OSError: the file cannot be written.
    """
    write_json(run_directory / FILE_NAME, facts.model_dump(mode="json"), durable=False)


def read_facts(run_directory: Path) -> MemoryFacts | None:
    """Return the facts of the last `train()` call that began; None if there are none, or they cannot be
    read.
    """
    try:
        return MemoryFacts.model_validate_json((run_directory / FILE_NAME).read_bytes())
    except (OSError, ValueError):  # pydantic's error is a ValueError
        return None


TRACE_FOLDER = "plan_traces"
"""In the run directory."""
VARIABLE = "GRPO_RUN_PLAN_TRACES"
"""Names the folder to the process."""


class _Message(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")


class TraceRequest(_Message):
    """What is traced, in this order, until a plan needs less in the phase than the first one."""

    facts: MemoryFacts
    plans: tuple[MemoryPlan, ...] = pydantic.Field(min_length=1)
    phase: str
    below_bytes: float | None = None
    """The peak to be lowered, if it is known; else it is that of the first plan."""


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
    return TraceRequest.model_validate_json((folder / "request.json").read_bytes())


def replies_file(folder: Path) -> Path:
    """Return the file of the replies."""
    return folder / "peaks.jsonl"


def output_file(folder: Path) -> Path:
    """Return the file of what the process prints."""
    return folder / "output.log"


def read_replies(folder: Path) -> list[TraceReply]:
    """Return the replies that have been written so far; a line that was not finished is left out."""
    replies: list[TraceReply] = []
    try:
        lines = replies_file(folder).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    for line in lines:
        try:
            replies.append(TraceReply.model_validate_json(line))
        except ValueError:  # pydantic's error is one
            break
    return replies
