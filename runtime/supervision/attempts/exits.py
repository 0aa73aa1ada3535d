"""The ranks that have exited in an attempt, and which of them failed.

The supervisor adds the exits that the agent reports; the incident investigation waits briefly for further
ones. Reads the error files that ranks write. Does not determine which rank caused the failure
(`watchdog.diagnosis.exits`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from grpo_run.runtime.errors import EXIT_FINISHED, EXIT_STOPPED
from grpo_run.runtime.processes.ranks import RankGroup
from grpo_run.runtime.record.attempt_files import AttemptFiles
from grpo_run.watchdog.diagnosis.exits import end_text
from grpo_run.watchdog.observation import Exit, RankState, Slot
from grpo_run.watchdog.out_of_memory.output import OUTPUT_BYTES, needs_output, reported_in


class Exits:
    """Exits of one attempt, in the order in which they were observed.

    Args:
        files: of the attempt.
        warn: receives (rank, text) for a rank that crashed after its script had completed, or left it with code 0.
    """

    def __init__(self, files: AttemptFiles, warn: Callable[[int, str], None]) -> None:
        self._files = files
        self._warn = warn
        self.seen: list[Exit] = []

    @property
    def failed(self) -> list[Exit]:
        """Exits of ranks whose script did not complete."""
        return [exit for exit in self.seen if not exit.completed]

    @property
    def stopped(self) -> bool:
        """Whether a rank exited because all ranks agreed to stop."""
        return any(exit.exit_code == EXIT_STOPPED for exit in self.seen)

    def past_training(self, slots: Mapping[int, Slot | None]) -> frozenset[int]:
        """Return the ranks that have returned from a `train()` call and not completed, if every other rank has completed.

        What such a rank still does is no training, which would need all ranks. Empty if no rank has completed, as
        between two calls.
        """
        exited = {exit.rank for exit in self.seen if exit.completed}
        states = {rank: slot.state if slot is not None else None for rank, slot in slots.items()}
        left = {
            rank: state
            for rank, state in states.items()
            if rank not in exited and state is not RankState.done
        }
        if len(left) == len(states) or any(
            state not in (RankState.between, RankState.returned) for state in left.values()
        ):
            return frozenset()
        return frozenset(left)

    def add(self, exits: Iterable[Exit], slots: Mapping[int, Slot | None]) -> None:
        """Record exits, each with its error file and with whether its script completed.

        Args:
            exits: new exits.
            slots: the latest reading of each rank's slot; None for one that could not be read.
        """
        for exit in exits:
            slot = slots.get(exit.rank)
            done = slot is not None and slot.state is RankState.done
            if done and exit.exit_code not in (EXIT_FINISHED, EXIT_STOPPED):
                self._warn(
                    exit.rank,
                    f"rank {exit.rank} {end_text(exit)} after its script had completed; its work is not lost",
                )
            # a script may end with os._exit(0) after its last train() call, but not inside one
            training = slot is not None and slot.state is RankState.training
            left = exit.exit_code == EXIT_FINISHED and not done and not training
            if left and slot is not None and slot.has_returned:
                self._warn(
                    exit.rank,
                    f"rank {exit.rank} exited with code 0 while threads of its script ran (os._exit?); it counts as finished",
                )
            elif left:
                when = "after its last train() call" if slot is not None and slot.train_call else "by itself"
                self._warn(
                    exit.rank,
                    f"rank {exit.rank} exited with code 0 {when}, without running the script's last line (os._exit?);"
                    " it counts as finished",
                )
            completed = done or left
            self.seen.append(self._explained(replace(exit, completed=completed)))

    def _explained(self, exit: Exit) -> Exit:
        """The exit with the error that the rank has left, and what its output adds to that."""
        exit = replace(exit, error=self._files.read_error(exit.rank))
        if exit.completed or not needs_output(exit):
            return exit
        said = reported_in(self._files.output_end(exit.rank, OUTPUT_BYTES), exit, time.time())
        return replace(exit, error=said) if said is not None else exit

    def raising(self, ranks: Iterable[int]) -> list[Exit]:
        """Return the exits to come of ranks that have written their error and have not been seen to exit.

        Their peers may exit first: they lose their connection while the rank still runs its exit handlers.

        Args:
            ranks: of this node.
        """
        left = sorted(set(ranks) - {exit.rank for exit in self.seen})
        errors = {rank: self._files.read_error(rank) for rank in left}
        return [
            Exit(rank=rank, pid=0, exit_code=1, signal=None, order=len(self.seen) + place, error=error)
            for place, (rank, error) in enumerate(errors.items())
            if error is not None and error.type != "SystemExit"  # its code may be 0
        ]

    def wait(self, ranks: RankGroup, seconds: float, slots: Mapping[int, Slot | None]) -> None:
        """Wait up to `seconds` for further exits; returns early when no rank is alive."""
        deadline = time.monotonic() + seconds
        while ranks.alive and (remaining := deadline - time.monotonic()) > 0:
            self.add(ranks.wait(remaining), slots)
