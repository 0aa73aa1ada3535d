"""The ledger of a run's `train()` calls: which were started, where they save, and their progress.

Replayed from the journal as part of `runtime.history.history`. The ranks of the next attempt receive it
(`KnownCall`), to recognize their calls in it: `runtime/rank/resuming/identification.py`. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from grpo_run.runtime.call_names import call_title
from grpo_run.runtime.history.events import (
    LoopLeft,
    RankStarted,
    ResumeChosen,
    TrainEnded,
    TrainRestored,
    TrainStarted,
)

MAX_PASSED_CALLS = 64
"""The newest calls that the next attempt is told. Older ones are recognized by the checkpoints in their own
directories. The limit of one environment variable is 128 KiB (execve(2))."""


@dataclass(frozen=True, kw_only=True)
class CallDirectory:
    """An output directory of a call, and what its name may have been made from.

    Attributes:
        path: without symbolic links.
        not_before, not_after: its name was chosen in between, in seconds since the epoch.
        pid: process id of rank 0 at that time; 0 if not known.
    """

    path: str
    not_before: float
    not_after: float
    pid: int = 0


@dataclass(kw_only=True)
class KnownCall:
    """One `train()` call of the run, as the journal has it. A committed step changes `reached` in place.

    Attributes:
        ordinal: its number in the run, which its checkpoints have too.
        trainer_class: name of the trainer's class.
        settings: digest of the trainer's settings; empty if not known.
        directories: its output directories, newest first. Several if the script gives each attempt another
            one.
        attempt: the last attempt in which it was begun or restored.
        target_steps: how many steps it takes.
        reached: its last committed step.
        saved: step of its newest checkpoint or snapshot; 0 if there is none.
        checkpoint: path of the newest checkpoint; None if the newest is a snapshot in memory.
        finished: it ran to its end.
        reopened: the script had ended it before its last step and runs again; nothing newer is saved yet.
        interrupted: it was running when its last attempt ended.
        replaces: the call that was lost when this one began from step 0 in its place; 0 for none.
        left: pairs of a rank and the number of steps after which the script left the loop there by `break`.
    """

    ordinal: int
    trainer_class: str
    settings: str = ""
    directories: tuple[CallDirectory, ...] = ()
    attempt: int = 0
    target_steps: int = 0
    reached: int = 0
    saved: int = 0
    checkpoint: str | None = None
    finished: bool = False
    reopened: bool = False
    interrupted: bool = False
    replaces: int = 0
    left: tuple[tuple[int, int], ...] = ()

    @property
    def place(self) -> str:
        """The call as messages name it."""
        where = self.directories[0].path if self.directories else None
        return call_title(self.ordinal, self.trainer_class, where)

    @property
    def progress(self) -> str:
        """How far the call is, as messages name it."""
        return f"step {self.reached} of {self.target_steps}" if self.target_steps else f"step {self.reached}"


@dataclass(kw_only=True)
class TrainCalls:
    """The calls of one run, by ordinal. `apply_*` take events in the order of the journal."""

    _calls: dict[int, KnownCall] = field(default_factory=dict)
    _running: int | None = None
    _last: int | None = None
    """The call that was begun or restored last."""
    _chosen: str | None = None
    """The checkpoint that the call about to begin resumes from."""
    resuming: bool = False
    """A call is about to resume, and is not loaded yet."""
    pids: dict[int, int] = field(default_factory=dict)
    """Processes of the present attempt's ranks on this node, by rank."""
    _attempt: int = 0
    _attempt_at: float = 0.0

    def __iter__(self) -> Iterator[KnownCall]:
        return iter(self._calls.values())

    def __len__(self) -> int:
        return len(self._calls)

    @property
    def output_directories(self) -> list[str]:
        """Where the calls save, each directory once."""
        return list(dict.fromkeys(one.path for call in self for one in call.directories))

    @property
    def interrupted(self) -> KnownCall | None:
        """The call that was running when the last attempt ended."""
        return None if self._running is None else self._calls[self._running]

    @property
    def ended_early(self) -> KnownCall | None:
        """The last call, if it is known to have more steps than it has taken."""
        last = None if self._last is None else self._calls[self._last]
        return last if last is not None and last.reached < last.target_steps else None

    def reopen(self) -> None:
        """The script runs again, although it has ended its last call before the last step."""
        self.forget_left()
        if (last := self.ended_early) is not None:
            self._change(last.ordinal, finished=False, reopened=True)

    @property
    def awaited(self) -> bool:
        """Whether an interrupted call with a checkpoint or snapshot has not been begun again in the present
        attempt.
        """
        call = self.interrupted
        return call is not None and call.saved > 0 and call.attempt < self._attempt

    def left_after(self, ordinal: int) -> int | None:
        """Return after how many steps all ranks that are known left a loop before its end, or None."""
        call = self._calls.get(ordinal)
        steps = {after for _, after in call.left} if call is not None and not call.finished else set()
        return steps.pop() if len(steps) == 1 else None

    def lineage(self, ordinal: int) -> int:
        """Return the first of the calls of which this one is a repetition from step 0; itself if it is none.

        A call that starts over in another directory makes no progress until it is further than the lost one
        was.
        """
        seen: set[int] = set()
        while (call := self._calls.get(ordinal)) is not None and call.replaces and ordinal not in seen:
            seen.add(ordinal)
            ordinal = call.replaces
        return ordinal

    def to_pass(self) -> tuple[KnownCall, ...]:
        """Return the calls for the ranks of the next attempt, oldest first."""
        calls = [replace(call, interrupted=call.ordinal == self._running) for call in self._calls.values()]
        return tuple(sorted(calls, key=lambda call: call.ordinal)[-MAX_PASSED_CALLS:])

    def apply_attempt_started(self, number: int, at: float) -> None:
        """A new attempt begins, at this time in seconds since the epoch."""
        self._attempt, self._attempt_at, self.pids = number, at, {}
        self.resuming = False

    def apply_rank_started(self, event: RankStarted) -> None:
        """A rank of the attempt is running."""
        self.pids[event.rank] = event.pid

    def apply_resume_chosen(self, event: ResumeChosen) -> None:
        """Rank 0 has chosen what the call about to begin resumes from."""
        self._chosen = event.path
        self.resuming = bool(self._chosen)

    def apply_train_started(self, event: TrainStarted) -> None:
        """Rank 0 has begun a call, at a step above 0 if it was resumed."""
        self.resuming = False
        if event.trainer_class is None:
            return  # written by an older release
        ordinal, step = event.train_call, event.step or 0
        known = self._calls.get(ordinal)
        directory = CallDirectory(
            path=event.output_dir, not_before=self._attempt_at, not_after=event.time, pid=self.pids.get(0, 0)
        )
        earlier = () if known is None else known.directories
        self._calls[ordinal] = KnownCall(
            ordinal=ordinal,
            trainer_class=event.trainer_class,
            settings=event.settings or "",
            directories=(directory, *(other for other in earlier if other.path != directory.path)),
            attempt=self._attempt,
            target_steps=event.target_steps or 0,
            reached=step,
            saved=step,
            checkpoint=self._chosen if step else None,
            replaces=event.replaces or (known.replaces if known is not None else 0),
            left=() if known is None else known.left,
            reopened=known is not None and known.reopened,
        )
        self._running = self._last = ordinal

    def apply_train_restored(self, event: TrainRestored) -> None:
        """A finished call is restored without training."""
        self.resuming = False
        ordinal = event.train_call
        self._change(ordinal, finished=True, attempt=self._attempt)
        self._last = ordinal if ordinal in self._calls else self._last
        if self._running == ordinal:
            self._running = None

    def apply_train_ended(self, event: TrainEnded) -> None:
        """A call ran to its end."""
        ordinal = event.train_call
        self._change(ordinal, finished=True, reached=event.step or 0)
        if self._running == ordinal:
            self._running = None

    def apply_loop_left(self, event: LoopLeft) -> None:
        """A rank has left a loop without its end."""
        call = self._calls.get(event.train_call)
        if call is not None:
            left = {**dict(call.left), event.rank: event.ends_after}
            self._change(call.ordinal, left=tuple(sorted(left.items())))

    def forget_left(self) -> None:
        """A loop that was left goes on until the script leaves it again."""
        for ordinal in self._calls:
            self._change(ordinal, left=())

    def apply_step_committed(self, ordinal: int, step: int) -> None:
        """All ranks have voted on a step."""
        call = self._calls.get(ordinal)
        if call is not None:
            call.reached = step  # a copy at each step would be half of the time of a replay

    def apply_saved(self, ordinal: int, step: int, path: str | None) -> None:
        """A checkpoint was published (`path`), or a snapshot taken in memory (None)."""
        known = self._calls.get(ordinal)
        if known is not None and step >= known.saved:
            same = step == known.saved
            self._calls[ordinal] = replace(
                known,
                saved=step,
                checkpoint=path or (known.checkpoint if same else None),
                reopened=known.reopened and same,
            )

    def apply_rolled_back(self, ordinal: int, step: int) -> None:
        """Checkpoints were set aside on purpose; the newest that is left is of `step`, 0 if there is none."""
        self._change(ordinal, saved=step, checkpoint=None)

    def _change(self, ordinal: int, **fields: Any) -> None:
        if ordinal in self._calls:
            self._calls[ordinal] = replace(self._calls[ordinal], **fields)
