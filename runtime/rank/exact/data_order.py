"""Save and restore the sample order of the current epoch.

`transformers` skips the batches of an epoch that were trained before, but draws the order of the epoch again:
a sampler with its own generator starts from its seed, as in the first epoch. This module records the state of
the generator at the start of each epoch and restores it before a resumed epoch starts. Called by `state.py`.
Does not change the order of an uninterrupted run.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from grpo_run.runtime.errors import CheckpointError

RANDOM_DATA = (
    "reading the training data draws random numbers from a global generator (torch, numpy or Python): after a"
    " recovery, these numbers differ from those of an uninterrupted run"
)
STREAM = (
    "the training data is a stream: a recovery reads it again from the start, and reads the same samples only"
    " if the stream is not random"
)
NO_SKIP = (
    "ignore_data_skip=True: after a recovery, the epoch starts again with samples that were already used"
)
FOREIGN_SAMPLER = (
    "the training data's sampler {name} does not allow its class to be replaced: after a recovery in a later"
    " epoch, the sample order may differ"
)


def find_sampler(loader: Any) -> Any | None:
    """Return the innermost sampler of a (prepared) data loader, or None for a stream."""
    node = getattr(loader, "batch_sampler", None)
    if node is None:
        return None
    for name in ("batch_sampler", "sampler"):  # wrappers of accelerate first, then torch's BatchSampler
        while (inner := getattr(node, name, None)) is not None and inner is not node:
            node = inner
    return node


def global_rng() -> dict[str, Any]:
    """Return the state of the global CPU generators, which a sampler or a dataset may draw from."""
    return {"torch": torch.get_rng_state(), "numpy": np.random.get_state(), "python": random.getstate()}


def set_global_rng(state: Any) -> None:
    """Restore the result of `global_rng`.

    Raises:
        CheckpointError: `state` is not such a result.
    """
    try:
        torch.set_rng_state(state["torch"])
        np.random.set_state(state["numpy"])
        random.setstate(state["python"])
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"invalid state of the random number generators: {error}") from error


def keep_remainder(trainer: Any) -> None:
    """Set the `remainder` of the loader that skips the trained batches of an epoch.

    The remainder is the number of samples in the last batch before padding. accelerate's skipping loader does
    not keep it; without it, metrics count the padding samples of the last batch twice.
    """
    full = trainer.callback_handler.train_dataloader
    skipping = getattr(getattr(trainer, "accelerator", None), "gradient_state", None)
    skipping = getattr(skipping, "active_dataloader", None)
    if skipping is None or skipping is full or not hasattr(skipping, "remainder"):
        return
    if getattr(full, "_drop_last", True) or not hasattr(full, "total_batch_size"):
        return
    try:
        samples = len(full.dataset)
    except TypeError:  # a stream; accelerate's shard of one has a `__len__` that raises, too
        return
    skipping.remainder = samples % full.total_batch_size


class DataOrder:
    """The sample order of one `train()` call. Call `close` to restore the sampler's class.

    Args:
        loader: the data loader that the Trainer prepared for the call.
        arguments: the `TrainingArguments`.
        warn: called with a one-line message, once per message, for what cannot be exact.
    """

    def __init__(self, loader: Any, arguments: Any, warn: Callable[[str], None]) -> None:
        self.sampler = find_sampler(loader)
        self._arguments = arguments
        self._warn = functools.cache(warn)  # each message once
        self._class: Any = type(self.sampler)
        self._at_start: dict[str, Any] | None = None
        self._rng: dict[str, Any] | None = None
        self._rng_unchecked = False
        self._began_epochs = 0
        self._resumed = False
        self._resumed_rng: Any = None
        self._watched = self.sampler is not None and self._watch()
        if getattr(arguments, "ignore_data_skip", False):
            self._warn(NO_SKIP)
        if self.sampler is None:
            self._warn(STREAM)

    def _watch(self) -> bool:
        """Replace the sampler's class with a subclass that records its state before each epoch."""
        original = self._class

        def __iter__(sampler: Any) -> Any:
            self._at_start = self._sampler_state()
            return original.__iter__(sampler)

        namespace = {
            "__iter__": __iter__,
            "__slots__": (),
            "__module__": original.__module__,
            "__doc__": original.__doc__,
        }
        try:
            self.sampler.__class__ = type(original.__name__, (original,), namespace)
        except (TypeError, AttributeError):
            self._warn(FOREIGN_SAMPLER.format(name=original.__qualname__))
            return False
        return True

    def _sampler_state(self) -> dict[str, Any]:
        generator, epoch = getattr(self.sampler, "generator", None), getattr(self.sampler, "epoch", None)
        return {
            "generator": generator.get_state() if isinstance(generator, torch.Generator) else None,
            "epoch": epoch if isinstance(epoch, int) else None,
        }

    @property
    def _has_persistent_workers(self) -> bool:
        return bool(self._arguments.dataloader_num_workers and self._arguments.dataloader_persistent_workers)

    def begin_epoch(self) -> None:
        """Call before the iterator of an epoch is created."""
        self._began_epochs += 1
        # an evaluation at the start may have drawn numbers since the restore
        if self._resumed_rng is not None:
            set_global_rng(self._resumed_rng)
            self._resumed_rng = None
        self._rng = global_rng()
        self._rng_unchecked = True

    def begin_step(self, load_rng: Callable[[], None]) -> None:
        """Call after the batches of a step have been read.

        The first call of an epoch checks whether reading drew random numbers.

        Args:
            load_rng: loads the random number generators from the checkpoint that the call resumed from.
        """
        if not self._rng_unchecked or self._rng is None:
            return
        self._rng_unchecked = False
        resumed_here = self._resumed and self._began_epochs == 1
        if self._resumed and self._has_persistent_workers:
            # an uninterrupted run keeps its workers, so it draws no seed for new ones
            if resumed_here:
                load_rng()
            else:
                torch.set_rng_state(self._rng["torch"])
        elif not resumed_here and self._drew_only_the_seed() is False:
            self._warn(RANDOM_DATA)

    def _drew_only_the_seed(self) -> bool | None:
        """Whether the epoch's start drew at most the data loader's seed; None if the sampler draws too."""
        assert self._rng is not None
        if self.sampler is None or not isinstance(getattr(self.sampler, "generator", None), torch.Generator):
            return None
        generator = torch.Generator()
        generator.set_state(self._rng["torch"])
        before_seed = generator.get_state()
        torch.empty((), dtype=torch.int64).random_(generator=generator)
        now = global_rng()
        torch_same = torch.equal(now["torch"], generator.get_state()) or torch.equal(
            now["torch"], before_seed
        )
        python_same = now["python"] == self._rng["python"]
        numpy_same = np.array_equal(now["numpy"][1], self._rng["numpy"][1])
        return torch_same and python_same and numpy_same and now["numpy"][2] == self._rng["numpy"][2]

    def state(self, *, epoch_ended: bool) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        """Return the sampler's state and the global generators' state for the epoch of the next step.

        Args:
            epoch_ended: the next step is the first of a new epoch, whose order has not been drawn yet.
        """
        if not self._watched:
            return None, self._rng
        return self._sampler_state() if epoch_ended else self._at_start, self._rng

    def restore(self, sampler_state: Any, rng: Any, source: str) -> None:
        """Restore the result of `state`, before the iterator of the resumed epoch is created.

        Args:
            source: path of the file, for the error message.

        Raises:
            CheckpointError: the state does not fit this sampler.
        """
        self._resumed = True
        if rng is not None:
            set_global_rng(rng)
            self._resumed_rng = rng
        if sampler_state is None or self.sampler is None:
            return
        try:
            if sampler_state["generator"] is not None:
                generator = getattr(self.sampler, "generator", None)
                if generator is None:  # accelerate's sampler creates its generator in its first epoch
                    generator = self.sampler.generator = torch.Generator()
                generator.set_state(sampler_state["generator"])
            if sampler_state["epoch"] is not None:
                self.sampler.epoch = int(sampler_state["epoch"])
        except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
            raise CheckpointError(
                f"{source} does not fit the sampler {self._class.__qualname__}: {error}"
            ) from error

    def close(self) -> None:
        """Restore the sampler's class."""
        if self._watched:
            self.sampler.__class__ = self._class
            self._watched = False
