"""The batches of a loop over a data loader, and its position in them: which epoch, which batch.

A resumed loop goes on with the batch after the last one that a finished step has used. The order of an epoch
depends on the state of random generators when the epoch began, so they are kept: the global ones, and those
of the loader and its samplers. With a batch sampler, the batches of finished steps are skipped without
reading their samples; other data is read again up to the position. `set_epoch` is called at each epoch, as
for samplers of `torch.utils.data.distributed`.

Not exact: random draws inside the workers of a data loader when an epoch is resumed in the middle; a stream
    that is random
by itself. Called by `steps.py`. Knows nothing of steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from grpo_run.runtime.errors import CheckpointError, ConfigError
from grpo_run.runtime.rank.exact.callback_state import GENERATORS
from grpo_run.runtime.rank.exact.data_order import global_rng, set_global_rng
from grpo_run.runtime.rank.exact.encoding import is_stateful
from grpo_run.runtime.upstream import torch_names

PARTS = ("batch_sampler", "sampler", "dataset")
"""Attributes under which loaders and samplers refer to what may have a generator or an epoch."""
_END = object()
"""Stands for the batch after the last one of an epoch."""


class DataPosition:
    """The batches of a loop on one rank.

    Args:
        loader: a data loader or any other iterable that can be iterated once per epoch.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._iterator: Iterator[Any] | None = None
        self._epoch = 0
        self._batches = 0
        self._start: dict[str, Any] = {}
        self._resumed: dict[str, Any] | None = None
        self._before: dict[str, Any] | None = None
        """The global generators when the last batch was asked for, if the loader then read the one after
        it.
        """

    def next(self, restore_random: Callable[[], None] = lambda: None) -> Any:
        """Return the next batch, of the next epoch if this one is over.

        Args:
            restore_random: given for the first batch of a resumed loop; sets the random generators as they
                were when the checkpoint was taken.

        Raises:
            ConfigError: there are no batches.
        """
        while True:
            if self._iterator is None:
                self._begin_epoch()
            if self._reads_ahead:
                self._before = global_rng()
            if self._iterator is None:
                batch = self._first_of_resumed(restore_random)
            else:
                batch = next(self._iterator, _END)
            if batch is not _END:
                self._batches += 1
                return batch
            if not self._batches:
                raise ConfigError("the data of the loop is empty, or an iterator that was used up before")
            self._epoch, self._batches, self._iterator = self._epoch + 1, 0, None

    def state(self) -> dict[str, Any]:
        """Return the position after the batches that were returned."""
        return {
            "epoch": self._epoch,
            "batches": self._batches,
            "start": self._start,
            "before": self._before,
            "generators": _read(self._loader),
            "loader": _base(self._loader).state_dict() if self._is_stateful else None,
        }

    def load(self, state: Any) -> None:
        """Go on from the result of `state`.

        Raises:
            CheckpointError: `state` is not such a result.
        """
        try:
            self._epoch, self._batches = int(state["epoch"]), int(state["batches"])
            self._resumed = dict(state)
        except (TypeError, KeyError, ValueError) as error:
            raise CheckpointError(f"invalid position in the data: {error!r}") from error

    @property
    def _is_stateful(self) -> bool:
        """Whether the loader keeps its own position, as torchdata's `StatefulDataLoader` does."""
        return is_stateful(_base(self._loader))

    @property
    def _reads_ahead(self) -> bool:
        """Whether the loader is accelerate's, which reads one batch ahead to know the last one."""
        return _base(self._loader) is not self._loader

    def _begin_epoch(self) -> None:
        if self._resumed is not None:
            self._set_start(self._resumed["start"])
        self._start = {"random": global_rng(), "generators": _read(self._loader)}
        _set_epoch(self._loader, self._epoch)
        if self._resumed is None:
            self._iterator = iter(self._loader)

    def _set_start(self, start: dict[str, Any]) -> None:
        set_global_rng(start["random"])
        _write(self._loader, start["generators"])

    def _first_of_resumed(self, restore_random: Callable[[], None]) -> Any:
        """Begin the resumed epoch, skip the batches that were used, and return the next one or `_END`."""
        resumed, self._resumed = self._resumed, None
        assert resumed is not None, "the loop is resumed"
        waiting = [restore_random]

        def restore() -> None:
            while waiting:
                _write(self._loader, resumed["generators"])
                waiting.pop()()

        base = _base(self._loader)
        with ExitStack() as replaced:
            if self._is_stateful:
                base.load_state_dict(resumed["loader"])
                self._iterator = iter(self._loader)
                restore()
            elif _has_batch_sampler(base) and not (self._reads_ahead and self._batches == 1):
                persistent = base.num_workers > 0 and base.persistent_workers and self._epoch > 0
                skipping = _SkippingSampler(
                    base.batch_sampler,
                    self._batches,
                    # kept workers draw no seed at the start of an epoch; new ones just have
                    begin=(lambda: self._set_start(resumed["start"])) if persistent else (lambda: None),
                    end=(lambda: set_global_rng(resumed["before"])) if self._reads_ahead else restore,
                    end_ahead=restore,
                )
                replaced.enter_context(torch_names.replaced_batch_sampler(base, skipping))
                self._iterator = iter(self._loader)
            else:  # the first batch read ahead was read with the one before it
                self._iterator = iter(self._loader)
                for _ in range(self._batches):
                    next(self._iterator, _END)
                restore()
            batch = next(self._iterator, _END)
            restore()  # a loader that reads on one rank for all asks only that rank's sampler
        return batch


class _SkippingSampler:
    """A batch sampler whose first iteration leaves out the batches that were used.

    Args:
        begin: called before the first batch is asked for.
        end: called before the first batch that is not left out is asked for.
        end_ahead: called before the one after it.
    """

    def __init__(
        self,
        inner: Any,
        skipped: int,
        *,
        begin: Callable[[], None],
        end: Callable[[], None],
        end_ahead: Callable[[], None],
    ) -> None:
        self._inner = inner
        self._skipped: int | None = skipped
        self._begin = begin
        self._end = end
        self._end_ahead = end_ahead

    def __iter__(self) -> Iterator[Any]:
        iterator = iter(self._inner)
        if self._skipped is not None:
            skipped, self._skipped = self._skipped, None
            self._begin()
            for _ in range(skipped):
                next(iterator, _END)
            self._end()
            batch = next(iterator, _END)
            if batch is not _END:
                yield batch
                self._end_ahead()
        yield from iterator

    def __len__(self) -> int:
        return len(self._inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _base(loader: Any) -> Any:
    """Return the loader inside accelerate's."""
    return getattr(loader, "base_dataloader", loader)


def _has_batch_sampler(loader: Any) -> bool:
    return (
        isinstance(loader, DataLoader)
        and loader.batch_sampler is not None
        and not isinstance(loader.dataset, IterableDataset)
    )


def _parts(loader: Any) -> Iterator[tuple[str, Any]]:
    """Yield the loader, its samplers and its dataset with their paths."""
    waiting, seen = [("", _base(loader))], set[int]()
    while waiting:
        path, part = waiting.pop()
        if part is None or id(part) in seen:
            continue
        seen.add(id(part))
        yield path, part
        waiting += [(f"{path}{name}.", getattr(part, name, None)) for name in PARTS]


def _generators(loader: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield path, generator, and how it is read and set."""
    for path, part in _parts(loader):
        generator = getattr(part, "generator", None)
        for kind, accessors in GENERATORS.items():
            if isinstance(generator, kind):
                yield f"{path}generator", generator, accessors


def _read(loader: Any) -> dict[str, Any]:
    return {path: read(generator) for path, generator, (read, _) in _generators(loader)}


def _write(loader: Any, states: dict[str, Any]) -> None:
    for path, generator, (_, write) in _generators(loader):
        if path in states:
            write(generator, states[path])


def _set_epoch(loader: Any, epoch: int) -> None:
    if hasattr(loader, "set_epoch"):  # accelerate's tells its samplers
        loader.set_epoch(epoch)
        return
    for _, part in _parts(loader):
        if callable(set_epoch := getattr(part, "set_epoch", None)):
            set_epoch(epoch)
