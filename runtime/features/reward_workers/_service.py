"""The reward service of one rank: call functions in workers, and decide what a failed call means.

A failed batch is searched for the samples that the function fails on: each gets `-inf`, and the others keep
their rewards. A function that
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
from typing import Any

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


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A sample that a function failed on: its place in the rank's batch, why, its prompt and its
    completion.
    """

    index: int
    failure: Failure
    prompt: Any
    completion: Any


LogFailure = Callable[[str, Failure, Sequence[Sample], int], None]
"""Receives a failed call: of which function, why, the samples without a reward, and the size of the batch."""


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
    """

    def __init__(
        self, pool: WorkerPool, learn: Callable[[], Learned], *, log: LogFailure, warn: Callable[[str], None]
    ) -> None:
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
        else:
            seconds = moved.learned.longest_call_seconds()
            reply = self._call(moved, batch.all, batch, read_generators(), seconds)
        if reply.stays:
            self._keep_in_rank(moved, reply.stays)
            return None
        if reply.failure is not None:
            self._pool.refresh()
            return self._search(moved, batch, reply, reply.failure)
        moved.has_returned = True
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
        self, moved: MovedFunction, batch: RewardBatch, whole: Reply, failure: Failure
    ) -> list[Any] | None:
        """Find the samples that the function fails on, and return the rewards; None if the rank is to be
        tried.

        Args:
            whole: what the call of the whole batch has returned.
            failure: of it.
        """
        failures = dict.fromkeys(batch.all, failure)
        parts = [] if needs_whole_batch(moved.function) else _halves(batch.all)
        passed = self._bisect(moved, batch, failures, parts, whole.seconds)

        def rewards() -> list[Any]:
            return self._report(moved, batch, failure, failures, passed)

        if passed:
            moved.has_returned = True
            self._accept(passed[-1][1])
            return rewards()
        own_limit = failure.kind is FailureKind.timeout and bool(failure.traceback)
        kinds = {one.kind for one in (failure, *failures.values())}
        if not own_limit and kinds <= {FailureKind.timeout, FailureKind.not_tried}:
            moved.learned.note_slow(moved.learned.longest_call_seconds())
        if kinds == {FailureKind.exception} and not (moved.has_returned or moved.was_tried):
            moved.was_tried = True
            reason = f"raised {failure.message} in a worker only"
            moved.trial = rewards, lambda: self._keep_in_rank(moved, reason)
            return None
        return rewards()

    def _report(
        self,
        moved: MovedFunction,
        batch: RewardBatch,
        failure: Failure,
        failures: Mapping[int, Failure],
        passed: Passed,
    ) -> list[Any]:
        """Report a failed call, and return the rewards of the samples that are left."""
        samples = [
            Sample(index=index, failure=one, prompt=batch.prompts[index], completion=batch.completions[index])
            for index, one in sorted(failures.items())
        ]
        self._log(moved.name, failure, samples, batch.size)
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
            left = ends_at - time.monotonic()
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
        return passed

    def _accept(self, reply: Reply) -> None:
        assert reply.generators is not None
        write_generators(reply.generators)


def _halves(part: range) -> list[range]:
    """Return the halves of a part, the left one last; none of a single sample."""
    middle = len(part) // 2
    return [part[middle:], part[:middle]] if middle else []
