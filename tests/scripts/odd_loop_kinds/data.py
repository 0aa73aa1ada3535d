"""Loops over data that is shuffled, streamed, or collated with random numbers."""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, TensorDataset

from odd_loop_kinds.training import WIDTH, Training


def workers(t: Training) -> None:
    """A shuffled data loader with workers, whose collation draws no numbers."""
    data = TensorDataset(torch.arange(13.0)[:, None].repeat(1, WIDTH))
    loader = DataLoader(data, batch_size=3, shuffle=True, num_workers=2)
    for _, (batch,) in t.steps(data=loader):
        t.step(batch)


class Stream(IterableDataset[torch.Tensor]):
    """A stream of numbered samples, another order in each epoch."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[torch.Tensor]:
        numbers = list(range(7))
        random.Random(self.epoch).shuffle(numbers)
        yield from (torch.full((WIDTH,), float(number)) for number in numbers)


def stream(t: Training) -> None:
    """An iterable data set."""
    for _, batch in t.steps(data=DataLoader(Stream(), batch_size=2)):
        t.step(batch)


def batches(t: Training) -> None:
    """A batch sampler, a collation that draws numbers, and a generator of the loader's own."""
    data = torch.arange(11.0)[:, None].repeat(1, WIDTH)
    sampler = BatchSampler(RandomSampler(data, generator=torch.Generator().manual_seed(5)), 3, drop_last=True)  # type: ignore[arg-type]

    def collate(items: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(items) + torch.rand(1) + random.random()

    for _, batch in t.steps(data=DataLoader(data, batch_sampler=sampler, collate_fn=collate)):  # type: ignore[arg-type]
        t.step(batch)
