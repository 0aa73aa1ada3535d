"""One trial call in the rank of a reward function that has raised on every sample in a worker.

It may need what only the rank has: a client that the script has opened, a logger that it has set up. If it returns in the
rank, it stays there; if it raises there too, its samples are excluded as those of any failed call. Made by `service.py`,
run by the wrappers of `served.py`. Does not call the function itself.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

from typing_extensions import Self

from grpo_run.trainers.rewards.workers.generators import read_generators, write_generators


class Trial:
    """Enter it around the call, and assign what the call returned to `values`.

    Args:
        exclude: reports the failed call and returns its rewards; without it, an exception is not handled.
        stay: keeps the function in the rank.
    """

    def __init__(
        self, exclude: Callable[[], list[Any]] | None = None, stay: Callable[[], None] = lambda: None
    ) -> None:
        self._exclude = exclude
        self._stay = stay
        self.values: Any = None

    def __enter__(self) -> Self:
        self._generators = read_generators() if self._exclude is not None else None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is None:
            self._stay()
            return False
        if self._exclude is None or not isinstance(error, Exception):
            return False
        if self._generators is not None:
            write_generators(self._generators)
        self.values = self._exclude()
        return True
