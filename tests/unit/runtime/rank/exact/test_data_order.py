"""A resumed run reads every epoch in the order of an uninterrupted run."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.data_loader import IterableDatasetShard
from datasets import Dataset
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler

from grpo_run.runtime.errors import CheckpointError
from grpo_run.runtime.rank.exact import data_order
from grpo_run.runtime.rank.exact.data_order import DataOrder, find_sampler


class Shuffled(Sampler[int]):
    """Like TRL's sampler: its own generator, never reseeded."""

    def __init__(self, seed: int = 5) -> None:
        self.generator = torch.Generator()
        self.generator.manual_seed(seed)

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(12, generator=self.generator).tolist()


class Counted(Sampler[int]):
    """Like accelerate's sampler: reseeded in each epoch from a counter that each epoch increases."""

    def __init__(self) -> None:
        self.generator: torch.Generator | None = None
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        self.generator = torch.Generator()
        self.generator.manual_seed(100 + self.epoch)
        yield from torch.randperm(12, generator=self.generator).tolist()
        self.epoch += 1


class GlobalShuffled(Sampler[int]):
    """A sampler of a user that draws from the global generators of the process."""

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(12).tolist()
        random.shuffle(order)
        yield from (order[index] for index in np.random.permutation(12).tolist())


def loader(sampler: Any) -> DataLoader[int]:
    return DataLoader(range(12), batch_sampler=BatchSampler(sampler, 3, drop_last=False))  # type: ignore[arg-type]


def arguments(**changes: Any) -> SimpleNamespace:
    fields = {"dataloader_num_workers": 0, "dataloader_persistent_workers": False, "ignore_data_skip": False}
    return SimpleNamespace(**(fields | changes))


def order(sampler: Any, warned: list[str] | None = None, **changes: Any) -> DataOrder:
    found = warned if warned is not None else []
    return DataOrder(loader(sampler), arguments(**changes), found.append)


@pytest.mark.parametrize("make", [Shuffled, Counted, GlobalShuffled])
@pytest.mark.parametrize("stopped_after", range(1, 12))
def test_a_resumed_run_reads_the_remaining_batches_of_an_uninterrupted_run(
    make: Callable[[], Any], stopped_after: int
) -> None:
    """Holds after any of the 12 batches of three epochs, in the middle and at the end of an epoch."""
    torch.manual_seed(1), random.seed(2), np.random.seed(3)
    sampler = make()
    watched, batches, seen = order(sampler), [], 0
    state: Any = None
    for _ in range(3):
        watched.begin_epoch()
        for batch in BatchSampler(sampler, 3, drop_last=False):
            batches.append(batch)
            seen += 1
            if seen == stopped_after and stopped_after % 4:
                state = watched.state(epoch_ended=False)
        if seen == stopped_after:
            state = watched.state(epoch_ended=True)
            global_rng = data_order.global_rng()  # as transformers saves it in the checkpoint

    torch.manual_seed(77), random.seed(77), np.random.seed(77)
    fresh = make()
    resumed, again = order(fresh), []
    resumed.restore(*state, "file")
    torch.rand(1)  # an evaluation before the first epoch
    for epoch in range(stopped_after // 4, 3):
        resumed.begin_epoch()
        if stopped_after % 4 == 0 and epoch == stopped_after // 4:
            data_order.set_global_rng(global_rng)  # as the Trainer loads it
        epochs_batches = list(BatchSampler(fresh, 3, drop_last=False))
        again += epochs_batches[stopped_after % 4 if epoch == stopped_after // 4 else 0 :]
    assert again == batches[stopped_after:]


def test_watching_a_sampler_changes_neither_its_type_nor_its_order() -> None:
    """`close` restores the class and can be repeated."""
    plain, sampler = Shuffled(), Shuffled()
    watched = order(sampler)
    assert isinstance(sampler, Shuffled)
    assert type(sampler).__name__ == "Shuffled"
    for _ in range(3):
        assert list(plain) == list(sampler)
    for _ in range(2):
        watched.close()
        assert type(sampler) is Shuffled


def test_the_innermost_sampler_is_found() -> None:
    """The search goes through accelerate's batch wrappers and returns None for a stream."""
    sampler = Shuffled()
    batches = BatchSampler(sampler, 3, drop_last=False)
    sharded = SimpleNamespace(batch_sampler=SimpleNamespace(batch_sampler=batches))
    assert find_sampler(SimpleNamespace(batch_sampler=sharded)) is sampler
    assert find_sampler(SimpleNamespace(batch_sampler=None)) is None


def test_data_that_cannot_be_exact_is_warned_about() -> None:
    """A stream has no order that could be restored; without the skip, samples are used twice."""
    warned: list[str] = []
    watched = DataOrder(SimpleNamespace(batch_sampler=None), arguments(), warned.append)
    watched.begin_epoch()
    watched.restore(None, watched.state(epoch_ended=False)[1], "file")
    order(Shuffled(), warned, ignore_data_skip=True)
    assert warned == [data_order.STREAM, data_order.NO_SKIP]


@pytest.mark.parametrize(
    ("draw", "expected"),
    [
        (lambda: None, []),
        (lambda: torch.empty((), dtype=torch.int64).random_(), []),  # the data loader's own seed
        (lambda: torch.rand(1), [data_order.RANDOM_DATA]),
        (random.random, [data_order.RANDOM_DATA]),
        (np.random.rand, [data_order.RANDOM_DATA]),
    ],
)
def test_data_that_draws_random_numbers_is_warned_about_once(
    draw: Callable[[], Any], expected: list[str]
) -> None:
    """At the start of an epoch, only the data loader's own seed may be drawn."""
    warned: list[str] = []
    watched = order(Shuffled(), warned)
    for _ in range(2):
        watched.begin_epoch()
        draw()
        watched.begin_step(lambda: None)
        torch.rand(1)  # training may draw random numbers
        watched.begin_step(lambda: None)
    assert warned == expected


def test_persistent_workers_do_not_change_the_random_numbers_of_a_resumed_run() -> None:
    """An uninterrupted run starts its workers once; a resumed run starts them again, which draws a seed."""
    watched = order(Shuffled(), dataloader_num_workers=1, dataloader_persistent_workers=True)
    watched.restore(None, None, "file")
    loaded = []
    watched.begin_epoch()
    watched.begin_step(lambda: loaded.append("from the checkpoint"))
    assert loaded == ["from the checkpoint"]
    before = torch.get_rng_state()
    watched.begin_epoch()
    torch.rand(1)  # the seed of new workers
    watched.begin_step(lambda: loaded.append("again"))
    assert torch.equal(torch.get_rng_state(), before)
    assert loaded == ["from the checkpoint"]


@pytest.mark.parametrize("state", [{}, {"generator": 5, "epoch": None}, {"generator": None, "epoch": "x"}, 7])
def test_a_state_that_does_not_fit_the_sampler_is_rejected(state: Any) -> None:
    """The error is a CheckpointError that names the file and the sampler."""
    with pytest.raises(CheckpointError, match="the file does not fit the sampler Shuffled"):
        order(Shuffled()).restore(state, None, "the file")


def test_an_invalid_generator_state_is_rejected() -> None:
    """Applies to the global generators of the process."""
    with pytest.raises(CheckpointError, match="invalid state of the random number generators"):
        order(RandomSampler(range(3))).restore(None, {"torch": torch.zeros(1)}, "file")


def remainder(dataset: Any, *, drops_last: bool = False) -> int:
    """The remainder that a skipping loader gets, which is -1 before."""
    full = SimpleNamespace(dataset=dataset, total_batch_size=8, _drop_last=drops_last)
    skipping = SimpleNamespace(remainder=-1)
    trainer = SimpleNamespace(
        callback_handler=SimpleNamespace(train_dataloader=full),
        accelerator=SimpleNamespace(gradient_state=SimpleNamespace(active_dataloader=skipping)),
    )
    data_order.keep_remainder(trainer)
    return skipping.remainder


def test_a_skipping_loader_gets_the_remainder_of_the_full_loader() -> None:
    """The size of the last, incomplete batch; there is none with `drop_last` and for a stream. accelerate's
    shard of a stream, which more than one rank gets, has a length that raises.
    """
    assert remainder(range(33)) == 1
    assert remainder(range(33), drops_last=True) == -1
    stream: Any = Dataset.from_dict({"text": ["a"] * 9}).to_iterable_dataset()
    shard = IterableDatasetShard(stream, batch_size=4, num_processes=2, process_index=0)
    with pytest.raises(TypeError):
        len(shard)
    assert (remainder(stream), remainder(shard)) == (-1, -1)
