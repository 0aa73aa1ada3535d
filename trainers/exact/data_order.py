"""Where a run is in its data: which order the present epoch has, and how it was drawn.

`transformers` skips the batches of an epoch that were trained, but draws the epoch's order anew: a sampler with a
generator of its own starts from its seed, as if it were the first epoch. So the generator's state at the
beginning of the present epoch is remembered, and put back before a resumed epoch begins. Called by `state.py`.
Does not change the order of a run that was never hurt.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from grpo_run.runtime.errors import CheckpointError

RANDOM_DATA = (
    "reading the training data draws random numbers from a global generator (of torch, numpy or Python): after a"
    " recovery these draws differ from those of a run that was never hurt"
)
STREAM = (
    "the training data is a stream: a recovery reads it again from its beginning, and finds the same samples only if"
    " nothing in it is drawn at random"
)
NO_SKIP = (
    "ignore_data_skip=True: after a recovery the epoch begins again with samples that were trained on already"
)
FOREIGN_SAMPLER = "the training data's sampler {name} cannot be watched: after a recovery in a later epoch its order may differ"


def find_sampler(loader: Any) -> Any | None:
    """The innermost sampler of a (prepared) data loader, None for a stream."""
    node = getattr(loader, "batch_sampler", None)
    if node is None:
        return None
    for name in ("batch_sampler", "sampler"):  # accelerate's shards and skips first, then torch's batches
        while (inner := getattr(node, name, None)) is not None and inner is not node:
            node = inner
    return node


def global_rng() -> dict[str, Any]:
    """The CPU generators that a sampler or a dataset may draw from."""
    return {"torch": torch.get_rng_state(), "numpy": np.random.get_state(), "python": random.getstate()}


def set_global_rng(state: Any) -> None:
    """Put `global_rng` back.

    Raises:
        CheckpointError: it is not such a state.
    """
    try:
        torch.set_rng_state(state["torch"])
        np.random.set_state(state["numpy"])
        random.setstate(state["python"])
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"not a state of the random number generators: {error}") from error


def keep_remainder(trainer: Any) -> None:
    """Let the loader that skips an epoch's trained batches know how many samples of its last batch are real.

    accelerate's loses that when it skips, and metrics of a last batch that was filled up would count samples twice.
    """
    whole = trainer.callback_handler.train_dataloader
    skipping = getattr(getattr(trainer, "accelerator", None), "gradient_state", None)
    skipping = getattr(skipping, "active_dataloader", None)
    if skipping is None or skipping is whole or not hasattr(skipping, "remainder"):
        return
    if getattr(whole, "_drop_last", True) or not hasattr(whole, "total_batch_size"):
        return
    if hasattr(whole.dataset, "__len__"):
        skipping.remainder = len(whole.dataset) % whole.total_batch_size


class DataOrder:
    """One `train()` call's data loader. `close` gives the sampler back as it was.

    Args:
        loader: the loader the Trainer prepared for the call.
        warn: told once, in a sentence, of what cannot be exact.
    """

    def __init__(self, loader: Any, arguments: Any, warn: Callable[[str], None]) -> None:
        self.sampler = find_sampler(loader)
        self._arguments = arguments
        self._warn = warn
        self._warned: set[str] = set()
        self._class: Any = type(self.sampler)
        self._at_start: dict[str, Any] | None = None
        self._rng: dict[str, Any] | None = None
        self._rng_unchecked = False
        self._began_epochs = 0
        self._resumed = False
        self._resumed_rng: Any = None
        self._watched = self.sampler is not None and self._watch()
        if getattr(arguments, "ignore_data_skip", False):
            self._say(NO_SKIP)
        if self.sampler is None:
            self._say(STREAM)

    def _say(self, sentence: str) -> None:
        if sentence not in self._warned:
            self._warned.add(sentence)
            self._warn(sentence)

    def _watch(self) -> bool:
        """Let the sampler say when an epoch's order is about to be drawn; it stays what it was for `isinstance`."""
        own, remember = self._class, self._remember

        def __iter__(sampler: Any) -> Any:
            remember()
            return own.__iter__(sampler)

        names = {"__iter__": __iter__, "__slots__": (), "__module__": own.__module__, "__doc__": own.__doc__}
        try:
            self.sampler.__class__ = type(own.__name__, (own,), names)
        except (TypeError, AttributeError):
            self._say(FOREIGN_SAMPLER.format(name=own.__qualname__))
            return False
        return True

    def _remember(self) -> None:
        self._at_start = self._now()

    def _now(self) -> dict[str, Any]:
        generator, epoch = getattr(self.sampler, "generator", None), getattr(self.sampler, "epoch", None)
        return {
            "generator": generator.get_state() if isinstance(generator, torch.Generator) else None,
            "epoch": epoch if isinstance(epoch, int) else None,
        }

    @property
    def _keeps_workers(self) -> bool:
        return bool(self._arguments.dataloader_num_workers and self._arguments.dataloader_persistent_workers)

    def begin_epoch(self) -> None:
        """An epoch's iterator is about to be made."""
        self._began_epochs += 1
        if self._resumed_rng is not None:  # an evaluation at the start may have drawn since
            set_global_rng(self._resumed_rng)
            self._resumed_rng = None
        self._rng = global_rng()
        self._rng_unchecked = True

    def begin_step(self, load_rng: Callable[[], None]) -> None:
        """The step's batches have been read; the first call of an epoch looks at what reading them has drawn.

        Args:
            load_rng: loads the random number generators from the checkpoint the call resumed from.
        """
        if not self._rng_unchecked or self._rng is None:
            return
        self._rng_unchecked = False
        resumed_here = self._resumed and self._began_epochs == 1
        if self._resumed and self._keeps_workers:
            # the run that was never hurt kept its workers and drew no seed for new ones
            if resumed_here:
                load_rng()
            else:
                torch.set_rng_state(self._rng["torch"])
        elif not resumed_here and self._draws_nothing_else() is False:
            self._say(RANDOM_DATA)

    def _draws_nothing_else(self) -> bool | None:
        """Whether the beginning of the epoch drew only the data loader's own seed; None when it may draw more."""
        assert self._rng is not None
        if self.sampler is None or not isinstance(getattr(self.sampler, "generator", None), torch.Generator):
            return None
        expected = torch.Generator()
        expected.set_state(self._rng["torch"])
        seeded = expected.get_state()
        torch.empty((), dtype=torch.int64).random_(generator=expected)
        now = global_rng()
        drawn = torch.equal(now["torch"], expected.get_state()) or torch.equal(now["torch"], seeded)
        same = now["python"] == self._rng["python"] and np.array_equal(now["numpy"][1], self._rng["numpy"][1])
        return drawn and same and now["numpy"][2] == self._rng["numpy"][2]

    def state(self, *, epoch_ended: bool) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        """How the order is drawn of the epoch that the next step is in: the sampler's state, the global generators'.

        Args:
            epoch_ended: the next step is the first of an epoch that has not been drawn yet.
        """
        if not self._watched:
            return None, self._rng
        return self._now() if epoch_ended else self._at_start, self._rng

    def restore(self, sampler_state: Any, rng: Any, where: str) -> None:
        """Put back what `state` gave, before the resumed epoch's iterator is made.

        Raises:
            CheckpointError: the state is not one of this sampler's.
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
                if generator is None:  # accelerate's makes its own at its first epoch
                    generator = self.sampler.generator = torch.Generator()
                generator.set_state(sampler_state["generator"])
            if sampler_state["epoch"] is not None:
                self.sampler.epoch = int(sampler_state["epoch"])
        except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
            raise CheckpointError(
                f"{where} does not fit the sampler {self._class.__qualname__}: {error}"
            ) from error

    def close(self) -> None:
        """Give the sampler its own class back."""
        if self._watched:
            self.sampler.__class__ = self._class
            self._watched = False
