"""Data types of the choice of a checkpoint: what it depends on, and its result. Moves no files."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from grpo_run.runtime.checkpoints.compatibility import BatchGeometry, NamedShape
from grpo_run.runtime.checkpoints.manifest import TrainCall, read_manifest
from grpo_run.runtime.checkpoints.search import FoundCheckpoint
from grpo_run.runtime.errors import CheckpointError
from grpo_run.runtime.rank.resuming.memory import OpenSnapshot


@dataclass(frozen=True, kw_only=True)
class ResumeRequest:
    """Everything the choice of a checkpoint for one `train()` call depends on."""

    call: TrainCall
    run_id: str
    world_size: int
    first_attempt: bool
    run_started_at: float
    """Wall time in seconds."""
    script_argument: str | bool | None
    """The script's own `resume_from_checkpoint`."""
    resume_from: str | None
    """The value of `--resume-from`: a run id or a checkpoint directory."""
    fresh: bool = False
    """Whether the user asked for a new run in spite of other runs' checkpoints."""
    batch: BatchGeometry | None = None
    """The script's batch; None if not known."""
    parameters: tuple[NamedShape, ...] = ()
    """The model's parameters before it is wrapped; empty if not known."""
    also_search: tuple[Path, ...] = field(default=())
    """Other directories that may contain checkpoints of this run; at equal steps, `output_dir` wins."""
    reopened: bool = False
    """Whether the script had ended the call before its last step, in a run that has ended."""
    in_memory: FoundCheckpoint | None = None
    """A complete snapshot of this call that every rank can load; it wins unless `output_dir` has a later
    step."""

    @property
    def output_dir(self) -> Path:
        """The script's `output_dir`."""
        return Path(self.call.output_dir)


SENT = ("argument", "foreign", "reopened", "in_memory", "from_script", "notice", "ordinal", "fence")
"""Fields of a choice that are sent to the other ranks as they are."""


@dataclass(frozen=True, kw_only=True)
class ResumeChoice:
    """The `resume_from_checkpoint` argument to pass to `train()`, and where it comes from."""

    argument: str | bool | None
    checkpoint: FoundCheckpoint | None = None
    """The chosen checkpoint, if it has a manifest and belongs to this `train()` call."""
    foreign: bool = False
    """The checkpoint is of another run: a call that finished there may take more steps here."""
    reopened: bool = False
    """As `ResumeRequest.reopened`: the call goes on from its last step."""
    in_memory: bool = False
    """The checkpoint is `ResumeRequest.in_memory`."""
    snapshot: OpenSnapshot | None = None
    """The snapshot of this rank, open, if the checkpoint is in memory. Not sent to other ranks."""
    from_script: bool = False
    """`argument` is the script's own, on each rank."""
    notice: str | None = None
    """A one-line message for the user."""
    fence: str | None = None
    """With which rank 0 changes the call's checkpoints (`runtime/checkpoints/fencing.py`)."""
    ordinal: int = 0
    """The number of the call in the run, as rank 0 has recognized it; 0 for its position in the script."""

    @property
    def finished(self) -> bool:
        """Whether the checkpoint is the end of a finished call, which is restored and not trained again."""
        return self.checkpoint is not None and self.checkpoint.manifest.finished and not self.reopened

    @property
    def decides_anew(self) -> bool:
        """Whether the script decides anew if the call goes on, although it ended the call there."""
        return self.checkpoint is None or self.foreign or self.reopened

    def to_text(self) -> str:
        """Serialize the choice for the other ranks."""
        plain = {name: getattr(self, name) for name in SENT}
        return json.dumps({"checkpoint": str(self.checkpoint.path) if self.checkpoint else None, **plain})

    @classmethod
    def from_text(cls, text: str, request: ResumeRequest) -> ResumeChoice:
        """Parse rank 0's choice on another rank.

        Args:
            text: the result of `to_text`.
            request: of this rank.

        Raises:
            CheckpointError: this rank cannot see the checkpoint.
        """
        fields = json.loads(text)
        path, argument, checkpoint = fields.pop("checkpoint"), fields["argument"], None
        if fields["from_script"]:
            fields["argument"] = request.script_argument
        elif fields["in_memory"]:
            checkpoint = request.in_memory
            if checkpoint is not None:  # in the memory of this host, which has another path
                fields["argument"] = str(checkpoint.path)
        elif path is not None:
            checkpoint = FoundCheckpoint(path=Path(path), manifest=read_manifest(Path(path)))
        elif isinstance(argument, str) and not Path(argument).is_dir():
            raise CheckpointError(f"{argument} does not exist")
        return cls(checkpoint=checkpoint, **fields)


@dataclass(frozen=True, kw_only=True)
class RejectedCheckpoint:
    """A checkpoint that is not used, and why."""

    path: Path
    step: int | None
    reason: str
    corrupt: bool = False
    """Its contents prove it invalid, so that no run can use it."""
    own: bool = True
    """It is of this run. A checkpoint of another run is left in place."""


ReportRejected = Callable[[RejectedCheckpoint], None]
