"""What a resumed `train()` call needs beside a Hugging Face checkpoint to go on as if it had never been hurt.

`Trainer` saves weights, optimizer, schedule, random number generators and its state; TRL adds nothing. Missing, and
kept here for every rank: the micro-step counter and the rollout in use (a rollout may serve several optimizer
steps), the order of the present epoch, what is gathered for the next log line, a synced reference model, the order
in which DDP adds gradients up, and the state of reward functions that offer `state_dict` and `load_state_dict`.

Made by the guard for each `train()` call. `begin`, `begin_epoch`, `begin_step` and `end` are called at the call's
own events, `save` by every rank at every checkpoint.

What cannot be made exact, and is said once when it is seen: training data that is a stream with draws of its own;
datasets or collators that draw from global generators when they are read; `ignore_data_skip`; reward functions whose
state is neither numbers, text nor tensors. Not seen, and not kept: random draws inside data-loader workers when an
epoch is resumed in its middle; the state of environments, tools, rollout functions and servers; what a script's own
callbacks remember; images logged with completions until the next rollout; the order of a shuffled evaluation set
read by persistent workers; an epoch that a callback cut short.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from grpo_run.runtime.errors import CheckpointError
from grpo_run.trainers import upstream
from grpo_run.trainers.exact import data_order, format, reference_model, reward_state
from grpo_run.trainers.exact.data_order import DataOrder
from grpo_run.trainers.exact.format import Geometry, LossState, NotPlain, RankState
from grpo_run.trainers.exact.gradient_order import GradientOrder, concerned
from grpo_run.trainers.exact.resharding import ReshapeError, can_reshape, carried, read_all

__all__ = ["ExactState", "ReshapeError", "can_reshape", "geometry_of"]

IMAGES = "images"


def geometry_of(trainer: Any) -> Geometry | None:
    """How the trainer's rollouts fit its steps, None for a trainer without rollouts."""
    steps = getattr(trainer.args, "steps_per_generation", None)
    iterations = getattr(trainer, "num_iterations", None)
    if not isinstance(getattr(trainer, upstream.MICRO_STEP, None), int) or not steps or not iterations:
        return None
    return Geometry(
        steps_per_generation=steps,
        num_iterations=iterations,
        accumulation=trainer.args.gradient_accumulation_steps,
    )


class ExactState:
    """The exact state of one `train()` call on this rank. `close` takes off every hook.

    Args:
        warn: told in a sentence of what cannot be exact.
        clock: seconds, for the training time that is summed over attempts.
    """

    def __init__(
        self,
        trainer: Any,
        *,
        rank: int,
        world_size: int,
        warn: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._trainer = trainer
        self._rank = rank
        self._world_size = world_size
        self._warn = warn
        self._warned: set[str] = set()
        self._clock = clock
        self._order: DataOrder | None = None
        self._gradients: GradientOrder | None = None
        self._folder: Path | None = None
        self._remainder_set = False
        self._began_at = clock()
        self._earlier_seconds = 0.0
        self._ended = False

    def _say(self, sentence: str) -> None:
        if sentence not in self._warned:
            self._warned.add(sentence)
            self._warn(sentence)

    # events of the call, in their order

    def begin(self, resumed_from: Path | None) -> None:
        """The loop is about to start: model, optimizer and data loader are there.

        Raises:
            CheckpointError: the checkpoint's files are not what was written.
            ReshapeError: they are of other ranks or rollout settings, and bound to them.
        """
        self._began_at = self._clock()
        loader = self._trainer.callback_handler.train_dataloader
        self._order = DataOrder(loader, self._trainer.args, self._say)
        model = getattr(self._trainer, "model_wrapped", None)
        if concerned(model, self._world_size):
            self._gradients = GradientOrder(model)
        if resumed_from is not None:
            self.restore(resumed_from)
        if self._gradients is not None and self._gradients.order is None:
            self._gradients.record()

    def begin_epoch(self) -> None:
        """An epoch's iterator is about to be made."""
        assert self._order is not None, "begin() comes first"
        self._order.begin_epoch()

    def begin_step(self) -> None:
        """An optimizer step's batches have been read."""
        assert self._order is not None, "begin() comes first"
        self._order.begin_step(self._load_rng)
        if self._folder is not None and not self._remainder_set:
            self._remainder_set = True
            data_order.keep_remainder(self._trainer)

    def end(self) -> None:
        """The loop is over, and its pending loss is in the total."""
        self._ended = True

    def close(self) -> None:
        """Take the hooks off."""
        if self._order is not None:
            self._order.close()
        if self._gradients is not None:
            self._gradients.close()
        self._trainer.__dict__.pop(upstream.FINALIZE, None)

    def _load_rng(self) -> None:
        if self._folder is not None:
            getattr(self._trainer, upstream.LOAD_RNG)(str(self._folder))

    # saving

    def save(self, folder: Path) -> None:
        """Write this rank's files into a checkpoint directory that is not published yet. No collective."""
        trainer, tensors = self._trainer, dict[str, torch.Tensor]()
        epoch = getattr(trainer.state, "epoch", None)
        sampler = rng = None
        if self._order is not None:
            sampler, rng = self._order.state(epoch_ended=epoch is not None and float(epoch).is_integer())
        geometry = geometry_of(trainer)
        micro_step = buffered = None
        if geometry is not None:
            micro_step = getattr(trainer, upstream.MICRO_STEP)
            if micro_step % geometry.generate_every:  # else the next micro-step makes a new one
                buffered = getattr(trainer, upstream.BUFFERED_INPUTS)
        reference = reference_model.synced(trainer)
        (folder / format.FOLDER).mkdir(mode=0o700, parents=True, exist_ok=True)
        state = RankState(
            schema_version=format.SCHEMA,
            rank=self._rank,
            world_size=self._world_size,
            step=trainer.state.global_step,
            geometry=geometry,
            micro_step=micro_step,
            buffered_inputs=self._encoded(buffered, tensors, "the rollout in use"),
            tables=self._tables(tensors),
            train_tokens=_number(getattr(trainer, upstream.TRAIN_TOKENS, None)),
            loss=self._loss(),
            sampler=self._encoded(sampler, tensors, "the sampler's state"),
            epoch_rng=self._encoded(rng, tensors, "the random number generators"),
            rewards=reward_state.save(trainer, lambda value, where: self._encoded(value, tensors, where)),
            reference=reference_model.save(reference, folder, self._rank) if reference is not None else None,
            gradient_order=self._gradients.order if self._gradients is not None else None,
        )
        format.write(folder, state, tensors)

    def _encoded(self, value: Any, tensors: dict[str, torch.Tensor], where: str) -> Any:
        try:
            return format.encode(value, tensors, where)
        except NotPlain as error:
            self._say(f"{error}, which a checkpoint cannot hold: a recovery goes on without {where}")
            return None

    def _tables(self, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
        tables = {}
        for name in upstream.TABLES:
            table = getattr(self._trainer, name, None)
            if table is None or (name == upstream.COMPLETION_LOGS and self._rank):
                continue  # completions are shown by rank 0 alone
            if name == upstream.COMPLETION_LOGS and table.get(IMAGES):
                self._say("images logged with completions are not kept in checkpoints; the texts are")
            plain = {key: value for key, value in table.items() if key != IMAGES}
            tables[name] = {
                key: self._encoded(value, tensors, f"{name}[{key!r}]") for key, value in plain.items()
            }
        return tables

    def _loss(self) -> LossState | None:
        trainer = self._trainer
        if not hasattr(trainer, upstream.PENDING_LOSS):
            return None
        pending = float(getattr(trainer, upstream.PENDING_LOSS).item())
        total = float(getattr(trainer, upstream.TOTAL_LOSS))
        return LossState(
            pending=pending,
            total=total - pending if self._ended else total,
            last_logged_step=getattr(trainer, upstream.LAST_LOGGED_STEP),
            first_step=getattr(trainer, upstream.FIRST_STEP),
            seconds=self._earlier_seconds + self._clock() - self._began_at,
        )

    # restoring

    def restore(self, folder: Path) -> None:
        """Put back what `save` wrote; a checkpoint without it is accepted, and said to be inexact.

        Raises:
            CheckpointError: the files are not what was written.
            ReshapeError: they are of other ranks or rollout settings, and bound to them.
        """
        assert self._order is not None, "begin() comes first"
        self._folder = folder
        if not (folder / format.FOLDER).is_dir():
            self._say(
                f"{folder} was saved without grpo-run: what it was gathering for its logs, the order of data after"
                " the first epoch and a rollout under way are not in it, so the run may differ from one never stopped"
            )
            return
        trainer, geometry = self._trainer, geometry_of(self._trainer)
        own = self._rank if format.json_path(folder, self._rank).is_file() else 0
        state, tensors = format.read(folder, own)
        if state.world_size != self._world_size or state.geometry != geometry:
            state, tensors = format.read(folder, 0)
            if state.world_size != self._world_size:
                self._say(
                    f"{folder} is of {state.world_size} ranks: {self._world_size} ranks go on from it with random"
                    " numbers of their own"
                )
            state = carried(read_all(folder, state), self._world_size, geometry)
        elif own != self._rank:
            raise CheckpointError(f"{format.json_path(folder, self._rank)} is missing")
        where, device = str(format.json_path(folder, own)), trainer.args.device

        def decoded(value: Any) -> Any:
            return format.decode(value, tensors, device, where)

        if state.step != trainer.state.global_step:
            raise CheckpointError(
                f"{where} is of step {state.step}, the checkpoint of {trainer.state.global_step}"
            )
        if geometry is not None and state.micro_step is not None:
            setattr(trainer, upstream.MICRO_STEP, state.micro_step)
            if not state.at_boundary:
                self._set_buffer(decoded(state.buffered_inputs), geometry, where)
        for name, table in state.tables.items():
            if name in upstream.TABLES and hasattr(trainer, name):
                _fill(getattr(trainer, name), decoded(table), f"{where}: {name}")
        if state.train_tokens is not None and hasattr(trainer, upstream.TRAIN_TOKENS):
            setattr(trainer, upstream.TRAIN_TOKENS, state.train_tokens)
        if state.loss is not None and hasattr(trainer, upstream.PENDING_LOSS):
            self._restore_loss(state.loss)
        self._order.restore(decoded(state.sampler), decoded(state.epoch_rng), where)
        if different := reward_state.load(trainer, state.rewards, decoded):
            self._say(different)
        reference = reference_model.synced(trainer)
        if reference is not None and state.reference is not None:
            reference_model.load(reference, folder, self._rank, state.reference)
        if self._gradients is not None and state.gradient_order is not None:
            self._gradients.replay(state.gradient_order)

    def _set_buffer(self, buffer: Any, geometry: Geometry, where: str) -> None:
        if buffer is None:
            self._say(
                f"{where} lacks the rollout in use, which could not be saved: the run makes a new one and will differ"
            )
            return
        if not isinstance(buffer, list) or len(buffer) != geometry.steps_per_generation:
            raise CheckpointError(
                f"{where} does not hold a rollout of {geometry.steps_per_generation} micro-batches"
            )
        setattr(self._trainer, upstream.BUFFERED_INPUTS, buffer)

    def _restore_loss(self, loss: LossState) -> None:
        trainer = self._trainer
        getattr(trainer, upstream.PENDING_LOSS).fill_(loss.pending)
        setattr(trainer, upstream.TOTAL_LOSS, loss.total)
        setattr(trainer, upstream.LAST_LOGGED_STEP, loss.last_logged_step)
        setattr(trainer, upstream.FIRST_STEP, loss.first_step)
        self._earlier_seconds = loss.seconds
        original = getattr(trainer, upstream.FINALIZE)

        @functools.wraps(original)
        def finalize(trial: Any, num_train_samples: Any, start_time: float) -> Any:
            # its average is over all attempts' steps, so its time is over all attempts' too
            return original(trial, num_train_samples, start_time - loss.seconds)

        setattr(trainer, upstream.FINALIZE, finalize)


def _number(value: Any) -> int | float | None:
    """A count, as Python's own number."""
    number: int | float | None = value.item() if hasattr(value, "item") else value
    return number


def _fill(target: Any, value: Any, where: str) -> None:
    """Put values into containers that are there already, keeping their kinds and lengths."""
    if isinstance(target, dict) and isinstance(value, dict):
        for key, item in value.items():
            if item is None:  # could not be written
                continue
            try:
                there = target[key]  # a defaultdict makes what belongs there
            except KeyError:
                there = None
            if isinstance(there, (dict, list, deque)):
                _fill(there, item, f"{where}[{key!r}]")
            else:
                target[key] = item
    elif isinstance(target, (list, deque)) and isinstance(value, (list, deque)):
        target.clear()
        target.extend(value)
    else:
        raise CheckpointError(f"{where} is a {type(value).__name__} there and a {type(target).__name__} here")
