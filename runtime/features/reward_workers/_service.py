"""The reward service of one rank: call functions in workers, and decide what a failed call means.

A failed batch is searched for the samples that the function fails on: each gets `-inf`, and the others keep
their rewards. A function that is too slow for whole batches gets parts of them from then on. A function that
cannot run in a worker stays in the rank, with one warning. A function that raises on every sample in a worker
gets one trial call in the rank, because it may need what only the rank has, such as a client or a logger. If
it returns there, it stays there; if it raises there too, its samples are masked as those of any failed call.
Called by the wrappers of `_served.py`, which also run the trial. Starts no process itself (`_pool.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from grpo_run.runtime.errors import RewardError
from grpo_run.runtime.features.reward_workers import _packing as packing
from grpo_run.runtime.features.reward_workers._batch import RewardBatch
from grpo_run.runtime.features.reward_workers._deadlines import BISECTION_SECONDS, CallClock, Learned
from grpo_run.runtime.features.reward_workers._messages import Failure, Reply, Task
from grpo_run.runtime.features.reward_workers._pool import WorkerPool
from grpo_run.runtime.features.reward_workers.events import FailureKind
from grpo_run.runtime.rank.generators import GeneratorStates, read_generators, write_generators
from grpo_run.runtime.rank.points import failed, needs_whole_batch

Passed = list[tuple[range, Reply]]
"""Parts of a batch, and what was returned for each."""
SLOW_BATCHES = 2
"""Batches in a row that are searched before a function gets parts: a server may have been away for the first.
"""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A sample that a function failed on: its place in the rank's batch, why, its prompt and its
    completion.
    """

    index: int
    failure: Failure
    prompt: Any
    completion: Any


class Log(Protocol):
    """Receives failed calls."""

    def failed(self, name: str, failure: Failure, samples: Sequence[Sample], batch: int) -> None:
        """A call of a function has failed: for the whole batch, and for those samples of it."""


@dataclass(kw_only=True, eq=False)
class MovedFunction:
    """A reward function that runs in workers.

    Attributes:
        function: of the script.
        name: as TRL logs it.
        key: its number among the functions of this rank.
        learned: how long its calls take.
        packed: the function as it travels; empty if it stays in the rank from the start.
        stays: why it runs in the rank after all; empty while it runs in workers.
        has_returned: whether a worker has ever returned rewards of it.
        was_tried: whether its one trial in the rank was due.
        slow_batches: batches in a row that it did not return in time for, but for all of their parts.
        most: samples that it gets in one call; 0 for all of a batch.
        trial: what follows that trial, if it fails and if it does not, until the call is made.
    """

    function: Callable[..., Any]
    name: str
    key: int
    learned: Learned
    packed: bytes = b""
    stays: str = ""
    has_returned: bool = False
    was_tried: bool = False
    slow_batches: int = 0
    most: int = 0
    trial: tuple[Callable[[], list[Any]], Callable[[], None]] | None = None

    @contextmanager
    def tried(self) -> Iterator[list[Any]]:
        """Enter it around a call in the rank, which may be the trial.

        Yields:
            an empty list; after a trial that failed, which raises nothing, it has the rewards of that call.
        """
        values: list[Any] = []
        if self.trial is None:
            yield values
            return
        (exclude, stay), self.trial = self.trial, None
        generators = read_generators()
        try:
            yield values
        except Exception:  # noqa: BLE001 - whatever the function raises
            write_generators(generators)
            values += exclude()
        else:
            stay()


class RewardService:
    """Runs the functions of one rank in workers.

    Args:
        pool: the workers.
        learn: returns what is known of a new function's calls.
        log: of failures.
        warn: shows the user a sentence.
        at_start: returns whether functions are in workers because the first step of the run has failed twice.
    """

    def __init__(
        self,
        pool: WorkerPool,
        learn: Callable[[], Learned],
        *,
        log: Log,
        warn: Callable[[str], None],
        at_start: Callable[[], bool] = lambda: False,
    ) -> None:
        self._at_start = at_start
        self._pool = pool
        self._learn = learn
        self._log = log
        self._warn = warn
        self._functions = 0

    def add(self, function: Callable[..., Any], name: str) -> MovedFunction:
        """Move a function to the workers. What it needs is imported where they are forked, meanwhile."""
        moved = MovedFunction(function=function, name=name, key=self._functions, learned=self._learn())
        self._functions += 1
        try:
            moved.packed, modules = packing.pack_function(function)
            self._pool.prepare(modules)
        except packing.StaysInRankError as error:
            self._keep_in_rank(moved, str(error))
        except OSError as error:
            self._keep_in_rank(moved, f"has no worker ({error})")
        return moved

    def score(self, moved: MovedFunction, arguments: dict[str, Any]) -> list[Any] | None:
        """Return the rewards of one call; None if the caller must call the function, inside its trial if it
        has one.
        """
        if moved.stays:
            return None
        batch = RewardBatch(arguments)
        if arguments.get("environments") is not None:
            reply = Reply(stays="takes environments, which exist only in the rank")
        elif 0 < moved.most < batch.size:
            return self._search(moved, batch, _parts(batch.all, moved.most), Reply())
        else:
            seconds = moved.learned.longest_call_seconds()
            reply = self._call(moved, batch.all, batch, read_generators(), seconds)
        if stays := reply.stays or _needs_device(reply.failure):
            self._keep_in_rank(moved, stays)
            return None
        if reply.failure is not None:
            parts = [] if needs_whole_batch(moved.function) else _halves(batch.all)
            self._pool.refresh()
            return self._search(moved, batch, parts, reply)
        moved.has_returned, moved.slow_batches = True, 0
        moved.learned.add(reply.seconds)
        self._accept(reply)
        batch.replay([(batch.all, reply)])
        return reply.values

    def close(self) -> None:
        """End the workers."""
        self._pool.close()

    def _keep_in_rank(self, moved: MovedFunction, reason: str) -> None:
        moved.stays = reason
        self._warn(f"reward function {moved.name} stays in the rank: it {reason}")

    def _call(
        self,
        moved: MovedFunction,
        part: range,
        batch: RewardBatch,
        generators: GeneratorStates,
        seconds: float,
    ) -> Reply:
        """Make one call with a part of a batch."""
        try:
            arguments = packing.pack_arguments(batch.arguments(part))
            task = Task(key=moved.key, function=moved.packed, arguments=arguments, generators=generators)
            return self._pool.call(task, CallClock(moved.learned, seconds))
        except packing.StaysInRankError as error:
            return Reply(stays=str(error))
        except OSError as error:
            return Reply(stays=f"has no worker ({error})")

    def _search(
        self, moved: MovedFunction, batch: RewardBatch, parts: list[range], whole: Reply
    ) -> list[Any] | None:
        """Find the samples that the function fails on, and return the rewards; None if the rank is to be
        tried.

        Args:
            parts: to call the function with, the left one last.
            whole: what the call of the whole batch has returned; empty if none was made.

        Raises:
            RewardError: a time limit has expired in the first step, and it is not the size of the batch.
        """
        failures = dict.fromkeys(batch.all, whole.failure) if whole.failure is not None else {}
        passed = self._bisect(moved, batch, failures, parts, whole.seconds)
        failure = whole.failure or next(iter(failures.values()), None)

        def rewards() -> list[Any]:
            return self._report(moved, batch, failure, failures, passed)

        if passed:
            moved.has_returned = True
            self._accept(passed[-1][1])
            self._note_slow_batch(moved, whole.failure, failures, passed)
            return rewards()
        assert failure is not None
        own_limit = failure.kind is FailureKind.timeout and bool(failure.traceback)
        if own_limit and self._at_start() and not moved.has_returned:
            said = f"reward function {moved.name} {failure.message}"
            raise RewardError(f"{said}; each part of the batch fails too ({failures[0].message})")
        kinds = {one.kind for one in (failure, *failures.values())}
        if not own_limit and kinds <= {FailureKind.timeout, FailureKind.not_tried}:
            moved.learned.note_slow(moved.learned.longest_call_seconds())
        if kinds == {FailureKind.exception} and not (moved.has_returned or moved.was_tried):
            moved.was_tried = True
            reason = f"raised {failure.message} in a worker only"
            moved.trial = rewards, lambda: self._keep_in_rank(moved, reason)
            return None
        return rewards()

    def _note_slow_batch(
        self, moved: MovedFunction, failure: Failure | None, failures: Mapping[int, Failure], passed: Passed
    ) -> None:
        """A search has ended. If nothing failed but whole batches, in a row, the function gets parts.

        Args:
            failure: of the whole batch; None if no call was made of it.
        """
        slow = failure is not None and failure.kind is FailureKind.timeout
        slow = slow and all(one.kind is FailureKind.not_tried for one in failures.values())
        moved.slow_batches = moved.slow_batches + 1 if slow else 0
        if moved.slow_batches == SLOW_BATCHES:
            moved.most = max(len(part) for part, _ in passed)
            self._warn(
                f"reward function {moved.name} gets at most {moved.most} samples in one call from now on: it"
                " returns in time for so many, and not for a whole batch"
            )
        if moved.most:
            for _, reply in passed:
                moved.learned.add(reply.seconds)

    def _report(
        self,
        moved: MovedFunction,
        batch: RewardBatch,
        failure: Failure | None,
        failures: Mapping[int, Failure],
        passed: Passed,
    ) -> list[Any]:
        """Report a failed call, if there was one, and return the rewards of the samples that are left."""
        samples = [
            Sample(index=index, failure=one, prompt=batch.prompts[index], completion=batch.completions[index])
            for index, one in sorted(failures.items())
        ]
        if failure is not None:
            self._log.failed(moved.name, failure, samples, batch.size)
        batch.replay(passed)
        values: list[Any] = [None] * batch.size
        for index, one in failures.items():
            values[index] = failed(one.kind.value)
        for part, reply in passed:
            assert reply.values is not None
            values[part.start : part.stop] = reply.values
        return values

    def _bisect(
        self,
        moved: MovedFunction,
        batch: RewardBatch,
        failures: dict[int, Failure],
        waiting: list[range],
        whole_seconds: float,
    ) -> Passed:
        """Call the function with parts of a batch, then with the halves of each part that fails.

        Args:
            failures: why each sample failed, which is kept up to date; samples that did not are removed.
            waiting: the parts, the left one last; used up.
            whole_seconds: after which the function itself has ended the call of the batch; 0 if it has not.

        Returns:
            what the parts have returned that did not fail, from left to right.
        """
        passed = Passed()
        ends_at = time.monotonic() + BISECTION_SECONDS
        generators = read_generators()
        while waiting:
            part = waiting.pop()
            began = time.monotonic()
            left = ends_at - began
            if left <= 0:
                text = "was not called again: the search for the samples took too long"
                late = Failure(kind=FailureKind.not_tried, message=text)
                for one in (part, *waiting):
                    failures.update(dict.fromkeys(one, late))
                break
            levels = max(0, (len(part) - 1).bit_length())
            seconds = moved.learned.part_seconds(left, levels, whole_seconds)
            reply = self._call(moved, part, batch, generators, seconds)
            found = reply.failure
            if reply.stays:
                found = Failure(kind=FailureKind.exception, message=reply.stays)
            if found is not None:
                failures.update(dict.fromkeys(part, found))
                waiting += _halves(part)
                continue
            assert reply.generators is not None
            generators = reply.generators
            passed.append((part, reply))
            for sample in part:
                failures.pop(sample, None)
            if len(part) <= moved.most:  # a usual call, no search
                ends_at += time.monotonic() - began
        return passed

    def _accept(self, reply: Reply) -> None:
        assert reply.generators is not None
        write_generators(reply.generators)


def _halves(part: range) -> list[range]:
    """Return the halves of a part, the left one last; none of a single sample."""
    middle = len(part) // 2
    return [part[middle:], part[:middle]] if middle else []


def _parts(whole: range, most: int) -> list[range]:
    """Return parts of at most so many samples, the left one last."""
    return [whole[at : at + most] for at in range(0, len(whole), most)][::-1]


def _needs_device(failure: Failure | None) -> str:
    """Return that a function needs an accelerator, if it failed because a worker sees none; else nothing."""
    if failure is None or failure.kind is not FailureKind.exception:
        return ""
    import torch

    words = ("CUDA", "No HIP GPUs", "NVIDIA driver", "XPU")
    lacks = any(word in failure.message for word in words) and torch.accelerator.is_available()
    return "needs an accelerator" if lacks else ""
