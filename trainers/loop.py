"""Hand-written training loops that survive a fault: `steps` for loops over a number of steps, `begin` for any
other.

    from grpo_run.trainers import loop

    for step in loop.steps(1000, state={"model": model, "optimizer": optimizer}, output_dir="out"):
        loss = model(batch_of(step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

Under `grpo-run launch` the loop resumes after the last finished step with everything in `state` restored in
place, all ranks vote on each step, and checkpoints are taken and verified as for a Trainer. Under `torchrun`
and plain `python` the same script yields the same steps; nothing is saved or resumed then. Called by users'
scripts, from the main thread of every rank. See docs/guide/loops.md.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, TypeVar, overload

from grpo_run.runtime.errors import ConfigError
from grpo_run.runtime.rank.session import current

if TYPE_CHECKING:
    from grpo_run.runtime.rank.loops.data_position import DataPosition
    from grpo_run.runtime.rank.loops.run import SupervisedLoop
    from grpo_run.runtime.rank.loops.steps import PlainLoop, Run, Steps

Batch = TypeVar("Batch")


@overload
def steps(
    n: int,
    *,
    state: MutableMapping[str, Any],
    output_dir: str | os.PathLike[str],
    save_every: int | None = None,
    save_total_limit: int | None = None,
) -> Steps[int]: ...


@overload
def steps(
    n: int,
    *,
    state: MutableMapping[str, Any],
    output_dir: str | os.PathLike[str],
    data: Iterable[Batch],
    save_every: int | None = None,
    save_total_limit: int | None = None,
) -> Steps[tuple[int, Batch]]: ...


def steps(
    n: int,
    *,
    state: MutableMapping[str, Any],
    output_dir: str | os.PathLike[str],
    data: Iterable[Any] | None = None,
    save_every: int | None = None,
    save_total_limit: int | None = None,
) -> Steps[Any]:
    """Return the steps from the first that is not finished up to `n`, like `range`. Collective.

    A step is finished when the next one is asked for. A resumed loop starts with the step after the last one
    that was saved, with the objects in `state` and all random generators as they were then.

    Args:
        n: the number of steps, over all attempts.
        state: what the loop changes, by name. Objects with `state_dict` and `load_state_dict` (models,
            optimizers, schedulers, gradient scalers, samplers) and random generators are restored in place;
            numbers, strings, tensors and containers of these are set in the dictionary.
        output_dir: where `checkpoint-N` is written after N steps. The same in every attempt, one for each
            loop.
        data: a data loader, iterated over as many epochs as `n` steps need; yields pairs of step and batch.
            The loop keeps the position in it and calls `set_epoch` of its samplers.
        save_every: steps between checkpoints of the script's own; None for none. Snapshots for recovery are
            taken in either case.
        save_total_limit: how many of these checkpoints are kept; None for all.

    Raises:
        ConfigError: an entry of `state` cannot be saved, or the loop begins inside another one or inside a
            Trainer's `train()`.
        CheckpointError: the checkpoint does not fit `state`.
        Stopped: the user has asked for a stop.
    """
    _check(n, save_every)
    from grpo_run.runtime.rank.loops.data_position import DataPosition
    from grpo_run.runtime.rank.loops.steps import Steps

    position = DataPosition(data) if data is not None else None
    run = _begin(n, state, output_dir, save_every, save_total_limit, position)
    return Steps(run, n, position)


def begin(
    n: int | None = None,
    *,
    state: MutableMapping[str, Any],
    output_dir: str | os.PathLike[str],
    save_every: int | None = None,
    save_total_limit: int | None = None,
) -> Run:
    """Begin a loop that is not a `for`, and return it. Collective.

        with loop.begin(state=state, output_dir="out") as run:
            while not done():
                ...
                run.commit()

    The loop ends with the block, with `run.end()`, or after `n` steps.

    Args: as for `steps`; without `n` the number of steps is not known.

    Raises: as `steps`.
    """
    _check(n, save_every)
    from grpo_run.runtime.rank.loops.steps import Run

    return Run(_begin(n, state, output_dir, save_every, save_total_limit))


def log(values: Mapping[str, Any]) -> None:
    """Show numbers of the step in progress in the metrics, the progress line and reports. Not collective.

        loop.log({"loss": loss, "reward": rewards.mean()})

    `loss`, `reward`, `completion_length`, `grad_norm`, `learning_rate` (or `lr`) and the other names in
    `docs/reference/metrics.md` are known, also with `train/` before them. Other entries are ignored, so the
    dictionary may be the one that a logger gets. The numbers of rank 0 are those of the run; each rank's own
    are on the board. The learning guards judge the loss and the reward. Does nothing outside a loop and
    outside `grpo-run launch`.

    Args:
        values: numbers by name. A tensor of one element is read at once, which waits for its device.
    """
    session = current()
    if session is None:
        return
    from grpo_run.runtime.rank.step.guard import guard_of

    logs = guard_of(session).logs
    if logs is not None:
        logs(values)


def _check(n: int | None, save_every: int | None) -> None:
    if n is not None and n < 0:
        raise ConfigError(f"a loop of {n} steps")
    if save_every is not None and save_every < 1:
        raise ConfigError(f"save_every={save_every} of a loop: give a number of steps, or None")


def _begin(
    n: int | None,
    state: MutableMapping[str, Any],
    output_dir: str | os.PathLike[str],
    save_every: int | None,
    save_total_limit: int | None,
    data: DataPosition | None = None,
) -> SupervisedLoop | PlainLoop:
    # imports torch, which the script decides to import from where
    from grpo_run.runtime.rank.loops.run import SupervisedLoop
    from grpo_run.runtime.rank.loops.steps import PlainLoop

    session = current()
    if session is None:
        return PlainLoop(n)
    if threading.current_thread() is not threading.main_thread():
        # a stop and an exception would end this thread only, and the script would go on as if it had trained
        raise ConfigError(
            f"a loop begins in thread {threading.current_thread().name!r}: loops work in the main thread only"
        )
    return SupervisedLoop(
        session,
        n,
        state=state,
        output_dir=output_dir,
        data=data,
        save_every=save_every,
        save_total_limit=save_total_limit,
    )
