"""The reward service of one rank: call functions in workers, and decide what a failed call means.

A failed batch is searched for the samples that the function fails on: each gets `-inf`, and the others keep
their rewards. A function that cannot run in a worker stays in the rank, with one warning. A function that
raises on every sample in a worker gets one trial call in the rank, because it may need what only the rank
has, such as a client or a logger. If it returns there, it stays there; if it raises there too, its samples
are masked as those of any failed call. Called by the wrappers of `served.py`, which also run the trial.
Starts no process itself (`_pool.py`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from grpo_run.runtime.history.rewards import FailureKind
from grpo_run.runtime.launch.config import RunConfig
from grpo_run.runtime.rank.points import failed
from grpo_run.runtime.rank.rewards import _packing as packing
from grpo_run.runtime.rank.rewards._deadlines import CallClock, Learned
from grpo_run.runtime.rank.rewards._failures import FailureLog, Sample
from grpo_run.runtime.rank.rewards._messages import Failure, Reply, Task
from grpo_run.runtime.rank.rewards._pool import WorkerPool
from grpo_run.runtime.rank.rewards.batch import RewardBatch, needs_whole_batch
from grpo_run.runtime.rank.rewards.generators import GeneratorStates, read_generators, write_generators
from grpo_run.runtime.rank.rewards.host import WorkerHost, surroundings
from grpo_run.watchdog.stalls.durations import Durations

ALWAYS_NEEDED = ("transformers.trainer_callback", "numpy")
"""Modules of what every call is given."""


@dataclass(kw_only=True, eq=False)
class MovedFunction:
    """A reward function that runs in workers.

    Attributes:
        function: of the script.
        name: as TRL logs it.
        key: its number among the functions of this rank.
        learned: how long its calls take.
        stays: why it runs in the rank after all; empty while it runs in workers.
        has_returned: whether a worker has ever returned rewards of it.
        was_tried: whether its one trial in the rank was due.
        was_warned: whether the user knows that a call may take too long.
        trial: what follows that trial, if it fails and if it does not, until the call is made.
        packed: the function as it travels; None if it stays in the rank from the start.
    """

    function: Callable[..., Any]
    name: str
    key: int
    learned: Learned
    stays: str = ""
    has_returned: bool = False
    was_tried: bool = False
    was_warned: bool = False
    trial: tuple[Callable[[], list[Any]], Callable[[], None]] | None = None
    packed: packing.Packed | None = None

    @contextmanager
    def tried(self) -> Iterator[list[Any]]:
        """Enter it around a call in the rank, which may be the trial.

        Yields:
            an empty list; after a trial that failed, which raises nothing, it has the rewards of that call.
        """
        trial, self.trial = self.trial, None
        values: list[Any] = []
        if trial is None:
            yield values
            return
        exclude, stay = trial
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
        host: forks the workers.
        config: of the run.
        earlier: how long rewards took in earlier attempts; None if that is not known.
        workers: how many calls may run at the same time.
        memory_limit_bytes: of one worker.
        log: of failures.
        warn: shows the user a sentence, once for each subject.
        on_waiting: is called about once per second while a call is within its limits.
    """

    def __init__(
        self,
        host: WorkerHost,
        config: RunConfig,
        *,
        earlier: Durations | None,
        workers: int,
        memory_limit_bytes: int,
        log: FailureLog,
        warn: Callable[[str], None],
        on_waiting: Callable[[], None],
    ) -> None:
        self._config = config
        self._earlier = earlier
        self._log = log
        self._warn = warn
        self._host = host
        self._pool = WorkerPool(
            host,
            size=workers,
            memory_limit_bytes=memory_limit_bytes,
            on_replaced=log.replaced,
            on_waiting=on_waiting,
        )
        self._preparing: threading.Thread | None = None
        self._functions: list[MovedFunction] = []

    def add(self, functions: list[tuple[Callable[..., Any], str]]) -> list[MovedFunction]:
        """Move functions to the workers, and let the host import what they need, in the background.

        Args:
            functions: with their names.
        """
        added = []
        needed = set(ALWAYS_NEEDED)
        for function, name in functions:
            moved = MovedFunction(
                function=function, name=name, key=len(self._functions), learned=self.learned()
            )
            self._functions.append(moved)
            added.append(moved)
            try:
                moved.packed = packing.pack_function(function)
                needed |= moved.packed.modules
            except packing.StaysInRankError as error:
                self._keep_in_rank(moved, str(error))
        self._join_preparation()
        found = surroundings(frozenset(needed))
        self._preparing = threading.Thread(
            target=self._prepare, args=(found,), daemon=True, name="grpo-run-rewards"
        )
        self._preparing.start()
        return added

    def learned(self) -> Learned:
        """Return what is known of a new function's calls."""
        return Learned(self._config.deadlines, self._config.reward_timeout_seconds, self._earlier)

    def score(self, moved: MovedFunction, arguments: dict[str, Any]) -> list[Any] | None:
        """Return the rewards of one call; None if the caller must call the function, inside its trial if it
        has one.
        """
        self._join_preparation()
        if moved.stays:
            return None
        if arguments.get("environments") is not None:
            self._keep_in_rank(moved, "takes environments, which exist only in the rank")
            return None
        batch = RewardBatch(arguments)
        if (text := moved.learned.forecast(batch.size)) and not moved.was_warned:
            moved.was_warned = True
            self._warn(f"reward function {moved.name} {text}")
        try:
            reply = self._call(
                moved, batch.all, batch, read_generators(), moved.learned.longest_call_seconds()
            )
        except packing.StaysInRankError as error:
            self._keep_in_rank(moved, str(error))
            return None
        if reply.stays:
            self._keep_in_rank(moved, reply.stays)
            return None
        if reply.failure is None:
            moved.has_returned = True
            moved.learned.add(reply.seconds, batch.size)
            self._accept(reply.generators)
            batch.replay([(batch.all, reply)])
            return reply.values
        if _needs_device(reply.failure):
            self._keep_in_rank(moved, "needs an accelerator")
            return None
        return self._search(moved, batch, reply.failure)

    def close(self) -> None:
        """End the workers."""
        self._join_preparation()
        self._pool.close()

    def _prepare(self, found: Any) -> None:
        try:
            self._host.prepare(found)
        except OSError as error:
            for moved in self._functions:
                self._keep_in_rank(moved, f"has no worker ({error})")

    def _join_preparation(self) -> None:
        if self._preparing is not None:
            self._preparing.join()

    def _keep_in_rank(self, moved: MovedFunction, reason: str) -> None:
        if not moved.stays:
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
        """Make one call.

        Raises:
            StaysInRankError: the arguments cannot be pickled, or there is no worker.
        """
        assert moved.packed is not None
        task = Task(
            key=moved.key,
            function=moved.packed.content,
            arguments=packing.pack_arguments(batch.arguments(part)),
            generators=generators,
        )
        try:
            return self._pool.call(task, CallClock(moved.learned, seconds))
        except OSError as error:
            raise packing.StaysInRankError(f"has no worker ({error})") from error

    def _search(self, moved: MovedFunction, batch: RewardBatch, failure: Failure) -> list[Any] | None:
        """Find the samples that the function fails on, and return the rewards; None if the rank is to be
        tried.
        """
        failures = dict.fromkeys(batch.all, failure)
        passed: list[tuple[range, Reply]] = []
        if not needs_whole_batch(moved.function):
            self._pool.refresh()
            failures, passed = self._bisect(moved, batch, failure)
        if not passed:
            kinds = {one.kind for one in (failure, *failures.values())}
            if kinds <= {FailureKind.timeout, FailureKind.not_tried}:
                moved.learned.note_slow(moved.learned.longest_call_seconds())
            if kinds == {FailureKind.exception} and not (moved.has_returned or moved.was_tried):
                moved.was_tried = True
                moved.trial = (
                    lambda: self._rewards(moved, batch, failure, failures, passed),
                    lambda: self._keep_in_rank(moved, f"raised {failure.message} in a worker only"),
                )
                return None
        else:
            moved.has_returned = True
            self._accept(passed[-1][1].generators)
        return self._rewards(moved, batch, failure, failures, passed)

    def _rewards(
        self,
        moved: MovedFunction,
        batch: RewardBatch,
        failure: Failure,
        failures: Mapping[int, Failure],
        passed: list[tuple[range, Reply]],
    ) -> list[Any]:
        """Report a failed call and return the rewards of the samples that are left."""
        samples = [
            Sample(index=index, failure=one, prompt=batch.prompts[index], completion=batch.completions[index])
            for index, one in sorted(failures.items())
        ]
        self._log.failed(moved.name, failure, samples, batch.size)
        batch.replay(passed)
        values: list[Any] = [None] * batch.size
        for sample in samples:
            values[sample.index] = failed(sample.failure.kind)
        for part, reply in passed:
            assert reply.values is not None
            values[part.start : part.stop] = reply.values
        return values

    def _bisect(
        self, moved: MovedFunction, batch: RewardBatch, failure: Failure
    ) -> tuple[dict[int, Failure], list[tuple[range, Reply]]]:
        """Call the function with the halves of a batch that has failed, then with those of each half that
        fails.

        Returns:
            By sample, why it failed; and what the parts have returned that did not, from left to right.
        """
        failures = dict.fromkeys(batch.all, failure)
        passed: list[tuple[range, Reply]] = []
        ends_at = time.monotonic() + moved.learned.bisection_seconds(batch.size)
        generators = read_generators()
        waiting = _halves(batch.all)
        while waiting:
            part = waiting.pop()
            left = ends_at - time.monotonic()
            if left <= 0:
                text = "was not called again: the search for the samples took too long"
                late = Failure(kind=FailureKind.not_tried, message=text)
                for one in (part, *waiting):
                    failures.update(dict.fromkeys(one, late))
                break
            seconds = moved.learned.part_seconds(left, max(0, (len(part) - 1).bit_length()))
            try:
                reply = self._call(moved, part, batch, generators, seconds)
            except packing.StaysInRankError as error:
                reply = Reply(stays=str(error))
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
                del failures[sample]
        return failures, passed

    def _accept(self, generators: GeneratorStates | None) -> None:
        assert generators is not None
        write_generators(generators)


def _halves(part: range) -> list[range]:
    """Return the halves of a part, the left one last; none of a single sample."""
    middle = len(part) // 2
    return [part[middle:], part[:middle]] if middle else []


def _needs_device(failure: Failure) -> bool:
    """Whether a call failed because a worker sees no accelerator, where the rank has one."""
    if failure.kind is not FailureKind.exception:
        return False
    import torch

    words = ("CUDA", "No HIP GPUs", "NVIDIA driver", "XPU")
    return torch.accelerator.is_available() and any(word in failure.message for word in words)
