"""The ranks that have ended in this attempt, and which of them ended before their work was done.

The supervisor adds what the agent saw; the inquiry waits a moment for more. Reads the errors that ranks left behind;
does not say who was at fault (`watchdog.verdicts.failure`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from grpo_run.runtime.errors import EXIT_FINISHED, EXIT_STOPPED
from grpo_run.runtime.processes.ranks import RankGroup
from grpo_run.runtime.record.attempt_files import AttemptFiles
from grpo_run.watchdog.observation import Exit, RankState, Slot
from grpo_run.watchdog.verdicts.failure import signal_name


class Exits:
    """See the module.

    Args:
        files: of the attempt.
        warn: told of a rank that ended badly with its work done, as (rank, sentence).
    """

    def __init__(self, files: AttemptFiles, warn: Callable[[int, str], None]) -> None:
        self._files = files
        self._warn = warn
        self.seen: list[Exit] = []

    @property
    def failed(self) -> list[Exit]:
        """Those whose script had not run to its last line."""
        return [exit for exit in self.seen if not exit.completed]

    def add(self, exits: Iterable[Exit], slots: Mapping[int, Slot | None]) -> None:
        """Take exits into account, each with whether its script ran to its last line."""
        for exit in exits:
            slot = slots.get(exit.rank)
            done = slot is not None and slot.state is RankState.done
            if done and exit.exit_code not in (EXIT_FINISHED, EXIT_STOPPED):
                how = signal_name(exit.signal) if exit.signal else f"code {exit.exit_code}"
                text = f"rank {exit.rank} ended with {how} after its script's last line; its work was done"
                self._warn(exit.rank, text)
            completed = done or exit.exit_code == EXIT_FINISHED
            self.seen.append(replace(exit, completed=completed, error=self._files.read_error(exit.rank)))

    def wait(self, ranks: RankGroup, seconds: float, slots: Mapping[int, Slot | None]) -> None:
        """Go on looking for exits for so long: a collective's victims fall within milliseconds."""
        deadline = time.monotonic() + seconds
        while ranks.alive and (left := deadline - time.monotonic()) > 0:
            self.add(ranks.wait(left), slots)
