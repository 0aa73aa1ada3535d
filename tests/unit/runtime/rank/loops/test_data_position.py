"""A loop that is resumed at any batch reads on as the loop that was not interrupted."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    WeightedRandomSampler,
)

from grpo_run.runtime.errors import CheckpointError, ConfigError
from grpo_run.runtime.rank.exact.data_order import global_rng, set_global_rng
from grpo_run.runtime.rank.loops.data_position import DataPosition

SAMPLES, STEPS = 7, 9
"""Two epochs of batches of 2, and one batch."""


class Noisy(Dataset[Any]):
    """Samples with noise from a global generator of each library."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> float:
        return index + random.random() / 4 + float(np.random.rand()) / 4 + float(torch.rand(())) / 4


class Stream(IterableDataset[Any]):
    """A stream that is equal each time."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(SAMPLES))


class Epochs(Dataset[Any]):
    """Samples that depend on the epoch that they were told."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> int:
        return 100 * self.epoch + index


class Positioned:
    """A loader that keeps its own position, as torchdata's does."""

    def __init__(self) -> None:
        self.next = 0
        self.loaded: list[int] = []

    def __iter__(self) -> Iterator[int]:
        while self.next < SAMPLES:
            self.next += 1
            yield self.next - 1
        self.next = 0

    def state_dict(self) -> dict[str, int]:
        """Return the position."""
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Set the position."""
        self.next = state["next"]
        self.loaded.append(self.next)


def with_generator() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(5)
    return DataLoader(Noisy(), batch_size=2, shuffle=True, generator=generator)


def accelerated() -> Any:
    from accelerate import Accelerator

    return Accelerator(cpu=True).prepare(DataLoader(Noisy(), batch_size=2, shuffle=True))


LOADERS: dict[str, Callable[[], Any]] = {
    "in order": lambda: DataLoader(Noisy(), batch_size=2),
    "shuffled": lambda: DataLoader(Noisy(), batch_size=2, shuffle=True),
    "a generator": with_generator,
    "replacement": lambda: DataLoader(
        Noisy(), batch_size=2, sampler=WeightedRandomSampler([1.0] * SAMPLES, SAMPLES)
    ),
    "a batch sampler": lambda: DataLoader(
        Noisy(), batch_sampler=BatchSampler(RandomSampler(Noisy()), 2, drop_last=True)
    ),
    "distributed": lambda: DataLoader(
        Noisy(), batch_size=2, sampler=DistributedSampler(Noisy(), num_replicas=2, rank=1, seed=3)
    ),
    "single samples": lambda: DataLoader(Noisy(), batch_size=None, shuffle=True),
    "a stream": lambda: DataLoader(Stream(), batch_size=2),
    "a list": lambda: list(range(SAMPLES)),
    "accelerate's": accelerated,
    "told its epoch": lambda: DataLoader(Epochs(), batch_size=2),
}


def draws() -> list[float]:
    """Return the next number of each global generator, as a step of training draws them."""
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


def steps(position: DataPosition, count: int, restore: Callable[[], None] = lambda: None) -> list[Any]:
    """Read batches and draw numbers."""
    return [(repr(position.next(restore)), draws()) for _ in range(count)]


def seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("at", range(1, STEPS))
def test_a_resumed_position_reads_on(name: str, at: int) -> None:
    """The same batches, and the same numbers of the global generators, after every batch."""
    seed(1)
    expected = steps(DataPosition(LOADERS[name]()), STEPS)
    seed(1)
    before = DataPosition(LOADERS[name]())
    assert steps(before, at) == expected[:at]
    state, rng = before.state(), global_rng()
    seed(2)  # another process
    after = DataPosition(LOADERS[name]())
    after.load(state)
    assert steps(after, STEPS - at, lambda: set_global_rng(rng)) == expected[at:]


def test_a_loader_that_keeps_its_position_is_asked_for_it() -> None:
    """Nothing is read again."""
    before = DataPosition(Positioned())
    assert [before.next() for _ in range(SAMPLES + 2)] == [*range(SAMPLES), 0, 1]
    loader = Positioned()
    after = DataPosition(loader)
    after.load(before.state())
    assert [after.next() for _ in range(3)] == [2, 3, 4]
    assert loader.loaded == [2]


def test_skipped_batches_are_not_read() -> None:
    """An epoch may be large."""

    class Counting(Epochs):
        read = 0

        def __getitem__(self, index: int) -> int:
            self.read += 1
            return index

    before = DataPosition(DataLoader(Counting(), batch_size=2))
    for _ in range(3):
        before.next()
    data = Counting()
    after = DataPosition(DataLoader(data, batch_size=2))
    after.load(before.state())
    assert after.next().tolist() == [6]
    assert data.read == 1


def test_the_loader_is_left_as_it_was() -> None:
    """Its batch sampler is replaced for the first batch only."""
    loader = LOADERS["shuffled"]()
    sampler = loader.batch_sampler
    position = DataPosition(loader)
    position.next()
    state = position.state()
    again = DataPosition(loader)
    again.load(state)
    again.next()
    assert loader.batch_sampler is sampler


def test_empty_data_is_refused() -> None:
    """Also an iterator that has no second epoch."""
    with pytest.raises(ConfigError, match="empty"):
        DataPosition([]).next()
    position = DataPosition(iter([1]))
    position.next()
    with pytest.raises(ConfigError, match="empty"):
        position.next()


def test_an_invalid_position_is_refused() -> None:
    """It is part of a checkpoint."""
    with pytest.raises(CheckpointError, match="position"):
        DataPosition([1]).load({"epoch": None})
