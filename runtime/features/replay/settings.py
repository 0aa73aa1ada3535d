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
        changes_from: the step from which on samples are left out of the loss, or rewards are others; 0 for
            none.
        dropped: numbers of these samples.
        reward_file: a Python file with other reward functions; "" for none.
        shell_rank, terminal: on which rank and terminal the user is asked when the last step begins; "" for
            none.
    """

    NAME: ClassVar[str] = "replay"
    train_call: int = 1
    last_step: int = 0
    changes_from: int = 0
    dropped: tuple[int, ...] = ()
    reward_file: str = ""
    shell_rank: int = 0
    terminal: str = ""


SETTINGS = ReplaySettings
