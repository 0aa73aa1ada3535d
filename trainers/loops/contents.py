"""The contents of a loop's checkpoints: the script's objects, and what each rank keeps for itself.

Made by `run.py`; used by the savers (`saving/`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from grpo_run.runtime.checkpoints.manifest import TrainCall
from grpo_run.trainers.loops.state import LoopState
from grpo_run.trainers.rank.session import Session
from grpo_run.trainers.saving.contents import CheckpointContents


class LoopContents(CheckpointContents):
    """The contents of the checkpoints of one loop, and its step.

    Args:
        limit: the script's `save_total_limit`.
        write_rank_state: writes what each rank keeps for itself into the checkpoint's directory.
    """

    step = 0
    """The last finished step."""
    call_ends = False
    """Whether the loop takes no further step."""
    awaits_events = False
    limit: int | None = None

    def __init__(
        self,
        session: Session,
        call: TrainCall,
        state: LoopState,
        *,
        limit: int | None,
        write_rank_state: Callable[[Path], None],
    ) -> None:
        super().__init__(session, call, description=state.description(), size_bytes=state.size_bytes())
        self.limit = limit
        self._state = state
        self._write_rank_state = write_rank_state

    def parameters(self) -> Iterable[Any]:
        """Return the parameters of all modules."""
        return self._state.parameters()

    def write(self, folder: Path) -> None:
        """Write this rank's part. Not collective."""
        folder.mkdir(parents=True, exist_ok=True)
        self._state.write(folder)
        self._write_rank_state(folder)
