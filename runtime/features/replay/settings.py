"""What the part in a rank is told of a replay. `--keep-every` is an option of the run (`RunOptions`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, kw_only=True)
class ReplaySettings:
    """The step that a replay ends with.

    Attributes:
        train_call: of the step.
        last_step: 0 for a run that is no replay.
        shell_rank, terminal: on which rank and terminal the user is asked when the last step begins; "" for
            none.
    """

    NAME: ClassVar[str] = "replay"
    train_call: int = 1
    last_step: int = 0
    shell_rank: int = 0
    terminal: str = ""


SETTINGS = ReplaySettings
