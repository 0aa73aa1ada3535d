"""The order of every epoch is the undisturbed one, wherever the run was stopped, and no sampler is changed for it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler

from grpo_run.runtime.errors import CheckpointError
from grpo_run.trainers.exact import data_order
from grpo_run.trainers.exact.data_order import DataOrder, find_sampler


class Shuffled(Sampler[int]):
    """As TRL's sampler: a generator of its own, never reseeded."""

    def __init__(self, seed: int = 5) -> None:
        self.generator = torch.Generator()
        self.generator.manual_seed(seed)

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(12, generator=self.generator).tolist()


class Counted(Sampler[int]):
    """As accelerate's: seeded anew in each epoch by a counter that goes up at the epoch's end."""

    def __init__(self) -> None:
        self.generator: torch.Generator | None = None
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        self.generator = torch.Generator()
        self.generator.manual_seed(100 + self.epoch)
        yield from torch.randperm(12, generator=self.generator).tolist()
        self.epoch += 1


class OfTheGlobal(Sampler[int]):
    """A user's: draws from the process's generators."""

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


@pytest.mark.parametrize("make", [Shuffled, Counted, OfTheGlobal])
@pytest.mark.parametrize("stopped_after", range(1, 12))
def test_a_resumed_order_is_the_undisturbed_one(make: Callable[[], Any], stopped_after: int) -> None:
    """Stopped after any batch of three epochs of four, the rest is what it would have been."""
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
            global_rng = data_order.global_rng()  # as the checkpoint's own file has it

    torch.manual_seed(77), random.seed(77), np.random.seed(77)
    fresh = make()
    resumed, again = order(fresh), []
    resumed.restore(*state, "file")
    torch.rand(1)  # an evaluation before the first epoch
    for epoch in range(stopped_after // 4, 3):
        resumed.begin_epoch()
        if stopped_after % 4 == 0 and epoch == stopped_after // 4:
            data_order.set_global_rng(global_rng)  # the Trainer loads it there
        epochs_batches = list(BatchSampler(fresh, 3, drop_last=False))
        again += epochs_batches[stopped_after % 4 if epoch == stopped_after // 4 else 0 :]
    assert again == batches[stopped_after:]


def test_the_sampler_stays_what_it_is() -> None:
    """For `isinstance`, by name, and altogether once the call is over."""
    sampler = Shuffled()
    watched = order(sampler)
    assert isinstance(sampler, Shuffled)
    assert type(sampler).__name__ == "Shuffled"
    watched.close()
    assert type(sampler) is Shuffled
    watched.close()


def test_watching_changes_no_order() -> None:
    """The undisturbed run is the script's own."""
    plain, watched = Shuffled(), Shuffled()
    order(watched)
    for _ in range(3):
        assert list(plain) == list(watched)


def test_the_innermost_sampler_is_found() -> None:
    """Under what accelerate puts around a loader's batches."""
    sampler = Shuffled()
    batches = BatchSampler(sampler, 3, drop_last=False)
    sharded = SimpleNamespace(batch_sampler=SimpleNamespace(batch_sampler=batches))
    assert find_sampler(SimpleNamespace(batch_sampler=sharded)) is sampler
    assert find_sampler(SimpleNamespace(batch_sampler=None)) is None


def test_a_stream_is_said_to_be_one() -> None:
    """It has no order that could be put back."""
    warned: list[str] = []
    watched = DataOrder(SimpleNamespace(batch_sampler=None), arguments(), warned.append)
    watched.begin_epoch()
    watched.restore(None, watched.state(epoch_ended=False)[1], "file")
    assert warned == [data_order.STREAM]


def test_skipping_nothing_is_said() -> None:
    """Samples come twice."""
    warned: list[str] = []
    order(Shuffled(), warned, ignore_data_skip=True)
    assert warned == [data_order.NO_SKIP]


@pytest.mark.parametrize(
    ("draw", "said"),
    [
        (lambda: None, []),
        (lambda: torch.empty((), dtype=torch.int64).random_(), []),  # the loader's own seed
        (lambda: torch.rand(1), [data_order.RANDOM_DATA]),
        (random.random, [data_order.RANDOM_DATA]),
        (np.random.rand, [data_order.RANDOM_DATA]),
    ],
)
def test_data_that_draw_random_numbers_are_noticed_once(draw: Callable[[], Any], said: list[str]) -> None:
    """At the beginning of an epoch, where nothing but the loader's seed is to be drawn."""
    warned: list[str] = []
    watched = order(Shuffled(), warned)
    for _ in range(2):
        watched.begin_epoch()
        draw()
        watched.begin_step(lambda: None)
        torch.rand(1)  # training draws as it likes
        watched.begin_step(lambda: None)
    assert warned == said


def test_kept_workers_cost_a_resumed_run_no_draw() -> None:
    """A run that was never hurt starts them once; one that resumed starts them in its next epoch again."""
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
def test_a_strange_state_is_refused(state: Any) -> None:
    """As a checkpoint that cannot be trusted."""
    with pytest.raises(CheckpointError, match="the file does not fit the sampler Shuffled"):
        order(Shuffled()).restore(state, None, "the file")


def test_a_strange_generator_state_is_refused() -> None:
    """Of the process's own."""
    with pytest.raises(CheckpointError, match="not a state of the random number generators"):
        order(RandomSampler(range(3))).restore(None, {"torch": torch.zeros(1)}, "file")


@pytest.mark.parametrize(("drops_last", "expected"), [(False, 1), (True, -1)])
def test_a_skipping_loader_knows_how_much_of_its_last_batch_is_real(drops_last: bool, expected: int) -> None:
    """As the whole loader does; where the last batch is dropped there is nothing to know."""
    whole = SimpleNamespace(dataset=range(33), total_batch_size=8, _drop_last=drops_last)
    skipping = SimpleNamespace(remainder=-1)
    trainer = SimpleNamespace(
        callback_handler=SimpleNamespace(train_dataloader=whole),
        accelerator=SimpleNamespace(gradient_state=SimpleNamespace(active_dataloader=skipping)),
    )
    data_order.keep_remainder(trainer)
    assert skipping.remainder == expected
