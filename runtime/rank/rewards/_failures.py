"""Record failed reward calls: one journal event per failed batch, and one warning per kind.

Called by `_service.py`. Bounds what it writes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_run.runtime.event import Event
from grpo_run.runtime.history.rewards import RewardFailed, RewardWorkerReplaced
from grpo_run.runtime.rank.rewards._messages import Failure

MAX_SAMPLES = 8
"""Samples that one event describes; all of them are counted."""
MAX_TEXT_CHARACTERS = 300
MAX_TRACEBACK_CHARACTERS = 2000


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A sample that a function failed on: its place in the rank's batch, why, its prompt and its
    completion.
    """

    index: int
    failure: Failure
    prompt: Any
    completion: Any


class FailureLog:
    """Writes failures of one rank.

    Args:
        write: writes an event, with this rank and its step.
        warn: shows the user a sentence.
    """

    def __init__(self, write: Callable[[Event], None], warn: Callable[[str], None]) -> None:
        self._write = write
        self._warn = warn
        self._warned: set[tuple[str, str]] = set()

    def failed(self, name: str, failure: Failure, samples: Sequence[Sample], batch: int) -> None:
        """A call has failed.

        Args:
            name: of the function.
            failure: of the whole batch.
            samples: those without a reward.
            batch: the number of samples of the batch.
        """
        self._write(
            RewardFailed(
                function=name,
                kind=str(failure.kind),
                message=failure.message[:MAX_TEXT_CHARACTERS],
                traceback=failure.traceback[-MAX_TRACEBACK_CHARACTERS:],
                masked=len(samples),
                batch=batch,
                samples=[_described(sample) for sample in samples[:MAX_SAMPLES]],
            )
        )
        if (name, failure.kind) in self._warned:
            return
        self._warned.add((name, failure.kind))
        count = f"{len(samples)} of {batch} samples" if samples else "no sample"
        self._warn(
            f"reward function {name} {_said(failure)}: {count} masked; further ones are counted and not shown"
        )

    def replaced(self, reason: str) -> None:
        """A worker was replaced between two calls."""
        self._write(RewardWorkerReplaced(reason=reason))


def _said(failure: Failure) -> str:
    return f"raised {failure.message}" if failure.kind == "exception" else failure.message


def _described(sample: Sample) -> dict[str, Any]:
    return {
        "index": sample.index,
        "kind": str(sample.failure.kind),
        "message": sample.failure.message[:MAX_TEXT_CHARACTERS],
        "prompt": _text(sample.prompt),
        "completion": _text(sample.completion),
    }


def _text(value: Any) -> str:
    """The end of a prompt or a completion: conversations begin alike."""
    text = value if isinstance(value, str) else str(value[-1:] if isinstance(value, list) else value)
    return text[-MAX_TEXT_CHARACTERS:]
