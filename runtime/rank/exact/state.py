"""Save and restore what a Hugging Face checkpoint lacks for a bit-exact resume.

`Trainer` saves weights, optimizer, scheduler, random number generators and its own state; TRL adds nothing.
This package adds, per rank: the micro-step counter and the rollout in use (`_trainer_state.py`), the order of
    the
epoch (`data_order.py`), values accumulated for the next log line (`_trainer_state.py`), a synced reference
model (`_trainer_state.py`), the order in which DDP reduces gradients (`gradient_order.py`), stateful reward
functions (`_trainer_state.py`), the script's callbacks (`callback_state.py`), whether one of them ended the
call, and what features keep.

The guard creates one `ExactState` per `train()` call and calls `begin`, `begin_epoch`, `begin_step` and `end`
at the trainer's own events. Every rank calls `save` at every checkpoint.

Not exact, with one warning when it is seen: streaming data that draws random numbers; datasets or collators
that draw from global generators; `ignore_data_skip`; reward functions whose state contains other than
numbers, strings and tensors. Not exact, without a warning: random draws inside data-loader workers when an
epoch is resumed in the middle; the state of environments, tools, rollout functions and servers; images logged
with completions until the next rollout; the order of a shuffled evaluation set read by persistent workers; an
epoch that a callback ended early.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from grpo_run.runtime.errors import CheckpointError
from grpo_run.runtime.rank.exact import _trainer_state as trainer_state
from grpo_run.runtime.rank.exact import data_order, format
from grpo_run.runtime.rank.exact.callback_state import CallbackStates
from grpo_run.runtime.rank.exact.data_order import DataOrder
from grpo_run.runtime.rank.exact.encoding import Decoder, Encoder
from grpo_run.runtime.rank.exact.format import Geometry, SavedRankState
from grpo_run.runtime.rank.exact.geometry import read_all, regrouped, resharded
from grpo_run.runtime.rank.exact.gradient_order import GradientOrder, needs_gradient_order
from grpo_run.runtime.rank.points import CallPoints
from grpo_run.runtime.upstream import trainer_names


class ExactState:
    """The exact state of one `train()` call on this rank. Call `close` to remove every hook.

    Args:
        warn: called with a one-line message, once per message, for what cannot be exact.
        features: what they add to the call, whose state is a part of this.
        clock: monotonic seconds, for the training time that is summed over attempts.
    """

    def __init__(
        self,
        trainer: Any,
        *,
        rank: int,
        world_size: int,
        warn: Callable[[str], None],
        features: CallPoints | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._trainer = trainer
        self._rank = rank
        self._world_size = world_size
        self._warn = functools.cache(warn)  # each message once
        self._features = features
        self._clock = clock
        self._callbacks = CallbackStates(trainer.callback_handler.callbacks, self._warn)
        self.script_stopped = False
        """The restored checkpoint is of the step at which a callback of the script ended the call."""
        self.script_decides_anew = False
        """Where a callback had ended the call, callbacks begin anew and may end it later, as under
        torchrun.
        """
        self.epoch_ended = False
        """The events at the end of the present epoch have begun."""
        self._order: DataOrder | None = None
        self._gradients: GradientOrder | None = None
        self._resumed_from: Path | None = None
        self._remainder_set = False
        self._began_at = clock()
        self._earlier_seconds = 0.0
        self._ended = False

    # events of the call, in their order

    def begin(self, resumed_from: Path | None) -> None:
        """Prepare the call, before the training loop starts; model, optimizer and data loader exist.

        The script's callbacks have had `on_train_begin`.

        Args:
            resumed_from: the checkpoint directory that the trainer loaded, or None.

        Raises:
            CheckpointError: a file in the checkpoint is missing or invalid. ReshardError: the checkpoint is
            of another world size or of other rollout settings, and cannot be resharded.
        """
        self._began_at = self._clock()
        self._callbacks.begin()
        loader = self._trainer.callback_handler.train_dataloader
        keeps_order = self._features is not None and self._features.keeps_order
        warn = (lambda text: None) if keeps_order else self._warn
        self._order = DataOrder(loader, self._trainer.args, warn)
        model = getattr(self._trainer, "model_wrapped", None)
        if needs_gradient_order(model, self._world_size):
            self._gradients = GradientOrder(model)
        if resumed_from is not None:
            self.restore(resumed_from)
        if self._gradients is not None and self._gradients.order is None:
            self._gradients.record()

    def begin_epoch(self) -> None:
        """Call before the iterator of an epoch is created."""
        assert self._order is not None, "call begin() first"
        self.epoch_ended = False
        self._order.begin_epoch()

    def end_epoch(self) -> None:
        """Call when all callbacks have been told that the epoch has ended."""
        self.epoch_ended = True

    def begin_step(self) -> None:
        """Call after the batches of an optimizer step have been read."""
        assert self._order is not None, "call begin() first"
        self._order.begin_step(self.load_rng)
        if self._resumed_from is not None and not self._remainder_set:
            self._remainder_set = True
            data_order.keep_remainder(self._trainer)

    def end(self) -> None:
        """Call after the training loop, when transformers has added the pending loss to the total."""
        self._ended = True

    def close(self) -> None:
        """Remove every hook."""
        if self._order is not None:
            self._order.close()
        if self._gradients is not None:
            self._gradients.close()
        trainer_state.close(self._trainer)

    def load_rng(self) -> None:
        """Restore the random number generators as they were at the checkpoint, if there is one."""
        if self._resumed_from is not None:
            getattr(self._trainer, trainer_names.LOAD_RNG)(str(self._resumed_from))

    # saving

    def save(self, folder: Path) -> None:
        """Write this rank's files into a checkpoint directory that is not published yet. Not collective."""
        trainer, encoder = self._trainer, Encoder(self._warn)
        epoch = getattr(trainer.state, "epoch", None)
        sampler = epoch_rng = None
        if self._order is not None:
            sampler, epoch_rng = self._order.state(
                epoch_ended=epoch is not None and float(epoch).is_integer()
            )
        reference = trainer_state.synced(trainer)
        (folder / format.FOLDER).mkdir(mode=0o700, parents=True, exist_ok=True)
        state = SavedRankState(
            schema_version=format.SCHEMA,
            rank=self._rank,
            world_size=self._world_size,
            step=trainer.state.global_step,
            **trainer_state.save_rollout(trainer, encoder),
            tables=trainer_state.save_tables(trainer, self._rank, encoder, self._warn),
            train_tokens=trainer_state.save_train_tokens(trainer),
            loss=trainer_state.save_loss(trainer, seconds=self._training_seconds, ended=self._ended),
            sampler=encoder(sampler, "the sampler's state"),
            epoch_rng=encoder(epoch_rng, "the state of the random number generators"),
            rewards=trainer_state.save_reward_state(trainer, encoder),
            callbacks=self._callbacks.save(encoder),
            # at the last step transformers itself ends the call
            script_stopped=trainer.control.should_training_stop
            and trainer.state.global_step < trainer.state.max_steps,
            epoch_ended=self.epoch_ended,
            evaluating=not trainer.model.training,
            reference=trainer_state.save_reference_model(reference, folder, self._rank)
            if reference is not None
            else None,
            gradient_order=self._gradients.order if self._gradients is not None else None,
            guards=self._features.state() if self._features is not None else None,
        )
        format.write(folder, state, encoder.tensors)

    @property
    def _training_seconds(self) -> float:
        """Training time over all attempts."""
        return self._earlier_seconds + self._clock() - self._began_at

    # restoring

    def restore(self, folder: Path) -> None:
        """Restore what `save` wrote. A checkpoint without exact state is accepted, with a warning.

        Raises:
            CheckpointError: a file is missing or invalid. ReshardError: the checkpoint is of another world
            size or of other rollout settings, and cannot be resharded.
        """
        assert self._order is not None, "call begin() first"
        self._resumed_from = folder
        if not (folder / format.FOLDER).is_dir():
            self._warn(
                f"{folder} was saved without grpo-run: it lacks values accumulated for the next log line, the"
                " data order after the first epoch and a rollout in progress, so results may differ from an"
                " uninterrupted run"
            )
            return
        state, decoder, saved = self._read(folder)
        trainer = self._trainer
        if state.step != trainer.state.global_step:
            raise CheckpointError(
                f"{decoder.source} is of step {state.step}, but the checkpoint is of step"
                f" {trainer.state.global_step}"
            )
        trainer_state.restore_rollout(trainer, state, decoder, self._warn, saved=saved)
        trainer_state.restore_log_state(trainer, state, decoder)
        if state.loss is not None:
            self._earlier_seconds = state.loss.seconds
        self._order.restore(decoder(state.sampler), decoder(state.epoch_rng), decoder.source)
        if mismatch := trainer_state.load_reward_state(trainer, state.rewards, decoder):
            self._warn(mismatch)
        anew = state.script_stopped and self.script_decides_anew
        if not anew and (mismatch := self._callbacks.restore(state.callbacks, decoder)):
            self._warn(mismatch)
        if self._features is not None:
            self._features.load(state.guards)
        self.script_stopped = state.script_stopped and not anew
        self.epoch_ended = state.epoch_ended
        if state.evaluating:
            trainer.model.eval()  # after the last step, trainers log what belongs to the mode of the model
        reference = trainer_state.synced(trainer)
        if reference is not None and state.reference is not None:
            trainer_state.load_reference_model(reference, folder, self._rank, state.reference)
        if self._gradients is not None and state.gradient_order is not None:
            self._gradients.replay(state.gradient_order)

    def _read(self, folder: Path) -> tuple[SavedRankState, Decoder, Geometry | None]:
        """Return this rank's state, and the geometry with which it was saved; with another world size rank
        0's, resharded.
        """
        geometry = trainer_state.geometry_of(self._trainer)
        own = self._rank if format.rank_state_path(folder, self._rank).is_file() else 0
        state, tensors = format.read(folder, own)
        saved = state.geometry
        if state.world_size != self._world_size:
            state, tensors = format.read(folder, 0)
            self._warn(
                f"{folder} was saved by {state.world_size} ranks and is resumed by {self._world_size}:"
                " each rank starts with new random numbers"
            )
            state = resharded(read_all(folder, state), self._world_size, geometry)
        elif own != self._rank:
            raise CheckpointError(f"{format.rank_state_path(folder, self._rank)} is missing")
        elif saved != geometry:
            state = regrouped(state, geometry)
        source = str(format.rank_state_path(folder, own))
        return state, Decoder(tensors, self._trainer.args.device, source), saved
