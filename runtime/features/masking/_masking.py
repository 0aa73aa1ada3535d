"""Mask samples of a GRPO or RLOO trainer: leave them out of baseline, advantages and loss.

`mask_samples` is around TRL's scoring of a rollout, inside its phase, and `choose_samples` around the
computation of its rewards, outside that phase: rewards that are computed again count as a phase of their own
in the vote's fingerprint. TRL computes baselines and advantages and leaves out a row of its table of rewards
in which every column is NaN, so a masked sample becomes such a row. TRL gathers the table over the ranks, so
every rank finds the same, and nothing is sent unless a sample is masked. A rollout without masked samples is
returned as it is.

`mask` takes the rows out of what TRL computes after the rewards. GRPO multiplies its per-token loss by
`tool_mask`, which is not part of the attention mask, so log-probabilities stay as they are. RLOO has
`completion_mask` only: the sum of log-probabilities of a masked row is 0, and so must be the old one, or
its ratio would be an exponential of hundreds. Whether a masked row also leaves the divisor is TRL's: dapo,
cispo, vespo and bnpo divide by tokens that count, the others by rows.

What TRL logs of the rollout is corrected. Results of reward functions are checked while TRL computes
rewards, and those of reward models in the gathered table.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from grpo_run.runtime.errors import RewardError
from grpo_run.runtime.features.masking._outputs import check, describe
from grpo_run.runtime.features.masking._repeated import SampleFault, completion_checksum, read_earlier
from grpo_run.runtime.features.masking._report import MaskingReporter
from grpo_run.runtime.features.masking._selection import LEFT_OUT, RETURNED_NAN, Selection, select
from grpo_run.runtime.memory.script_settings import record_of
from grpo_run.runtime.rank.points import RowReasons, failed
from grpo_run.runtime.rank.session import Session
from grpo_run.runtime.upstream import trainer_names
from grpo_run.runtime.upstream.async_functions import is_coroutine_function
from grpo_run.runtime.upstream.patches import override_attributes
from grpo_run.runtime.upstream.rollout_names import (
    ADVANTAGES,
    COMPLETION_IDS,
    COMPLETION_MASK,
    ITEMS,
    OLD_LOGPS,
    TOOL_MASK,
    ZERO_STD,
)


def mask(rollout: dict[str, Any], rows: Collection[int], gather: Callable[[Any], Any]) -> None:
    """Mask rows of a rollout of this rank. Collective for GRPO: every rank calls it, also without rows.

    Args:
        rollout: what TRL's method returned; changed in place.
        rows: the masked rows of this rank.
        gather: the accelerator's, which concatenates over the ranks.
    """
    keep = rollout[COMPLETION_MASK].new_ones(len(rollout[COMPLETION_MASK]))
    keep[list(rows)] = 0
    dropped = keep == 0
    if ADVANTAGES in rollout:
        advantages = rollout[ADVANTAGES]
        rollout[ADVANTAGES] = advantages.masked_fill(_like(dropped, advantages), 0)
    if ITEMS in rollout:
        present = rollout.get(TOOL_MASK)
        tool_mask = (
            rollout[COMPLETION_MASK].new_ones(rollout[COMPLETION_MASK].shape) if present is None else present
        )
        rollout[TOOL_MASK] = tool_mask * _like(keep, tool_mask)
        counted = (rollout[COMPLETION_MASK] * rollout[TOOL_MASK]).sum()
        rollout[ITEMS] = gather(counted).sum()
    else:
        rollout[COMPLETION_MASK] = rollout[COMPLETION_MASK] * _like(keep, rollout[COMPLETION_MASK])
        rollout[OLD_LOGPS] = rollout[OLD_LOGPS].masked_fill(_like(dropped, rollout[OLD_LOGPS]), 0)


def _like(rows: Any, tensor: Any) -> Any:
    """Give one value for each row the shape that broadcasts over a tensor."""
    return rows.view(-1, *[1] * (tensor.dim() - 1))


def correct_zero_std(trainer: Any, selection: Selection, *, training: bool) -> None:
    """Take groups without samples out of the share of groups in which all rewards are equal.

    TRL divides by all groups. The value is left out of the average of the log line if there is no group left.
    """
    values = getattr(trainer, trainer_names.METRICS)["train" if training else "eval"].get(ZERO_STD)
    if not values or not selection.groups:
        return
    left = selection.group_count - len(selection.groups)
    values[-1] = min(1.0, values[-1] * selection.group_count / left) if left else math.nan


FailedBefore = Callable[[Sequence[Sequence[int]]], Mapping[int, str]]
"""Returns the rewards that failed before, by row, for the tokens of the completions."""


@dataclass(kw_only=True)
class Scored:
    """One computation of a rollout's rewards.

    Attributes:
        failed: why rewards of this rank are not valid, and of which completions, by row and column; nothing
            of a model.
        returned: what each function of this rank returned, and for how many completions, by column.
        table: of all ranks.
        selection: what leaves it.
    """

    failed: dict[tuple[int, int], SampleFault] = field(default_factory=dict)
    returned: dict[int, tuple[Any, int]] = field(default_factory=dict)
    table: Any = None
    selection: Selection = field(default_factory=lambda: Selection(samples={}))


def is_model(function: Any) -> bool:
    """Whether TRL calls a reward function as a model: it is a torch module."""
    return isinstance(function, torch.nn.Module)


def checked(
    function: Callable[..., Any], column: int, scored: Scored, failed_before: FailedBefore
) -> Callable[..., Any]:
    """Return the function with its result checked; a reward model is returned unchanged.

    Args:
        column: of the function in TRL's table.
        scored: receives what was returned, and the reasons of rewards that are not valid.
        failed_before: returns the rewards that failed when the same completions were scored before, by row.
    """
    if is_model(function):
        return function

    def examine(returned: Any, arguments: Mapping[str, Any]) -> Any:
        completion_ids = arguments[COMPLETION_IDS]
        values, reasons = check(returned, len(completion_ids))
        scored.returned[column] = returned, len(completion_ids)
        for row, reason in failed_before(completion_ids).items():
            if row not in reasons:
                values = list(values)
                values[row], reasons[row] = failed(reason), reason
        for row, reason in reasons.items():
            scored.failed[row, column] = SampleFault(reason, completion_checksum(completion_ids[row]))
        return values

    if is_coroutine_function(function):

        async def examined_async(*args: Any, **kwargs: Any) -> Any:
            return examine(await function(*args, **kwargs), kwargs)

        return functools.update_wrapper(examined_async, function)

    def examined(*args: Any, **kwargs: Any) -> Any:
        return examine(function(*args, **kwargs), kwargs)

    return functools.update_wrapper(examined, function)


ROLLOUTS_WITHOUT_REWARD = 10
"""So many rollouts in a row without one valid reward end the run: it learns nothing. Ten cost minutes; fewer
could all be bad luck where a rollout is small, or a judge that is away for a moment."""


class SampleMasking:
    """Excludes samples of one trainer's rollouts.

    Args:
        train_call: the number of the call in the run.
        leaving: why rows are left out, whatever their rewards are.
    """

    def __init__(self, trainer: Any, session: Session, train_call: int, leaving: RowReasons) -> None:
        self._trainer, self._session = trainer, session
        self._leaving = leaving
        self._left: Sequence[str] = ()
        """Why rows of this rank's last rollout were left out by others."""
        self._selection: Selection | None = None
        self._functions = list(getattr(trainer, "reward_func_names", ()))
        self._reporter = MaskingReporter(session, self._functions, train_call)
        self._earlier = read_earlier(session, train_call)
        self._rollouts_without_reward = 0
        """In a row, up to the last one."""
        self._first_without_reward = ""
        """What the functions returned in the first of them, and in which step."""

    def mask_samples(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Mask the samples that leave the rollout."""
        self._selection = None
        rollout = original(*args, **kwargs)
        selection = self._selection
        if selection is None or not selection.samples:
            return rollout
        if isinstance(rollout, dict) and COMPLETION_MASK in rollout and rollout.keys() & {ITEMS, OLD_LOGPS}:
            first, end = self._own_rows(len(rollout[COMPLETION_MASK]))
            rows = [number - first for number in selection.samples if first <= number < end]
            mask(rollout, rows, self._trainer.accelerator.gather)
        correct_zero_std(self._trainer, selection, training=self._is_training)
        return rollout

    def choose_samples(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Check the rewards of a rollout, and choose the samples that leave."""
        scored = self._compute(original, args, kwargs)
        selection = self._selection = scored.selection
        if self._is_training:
            self._reporter.rollout(is_empty=selection.is_empty, step=self._step)
        if selection.not_applicable:
            self._reporter.not_applicable(selection.not_applicable)
        if selection.samples:
            self._report(scored)
        if self._is_training:
            self._count_rollouts_without_reward(scored)
        if not selection.samples and not selection.not_applicable:
            return scored.table
        table = scored.table.masked_fill(scored.table == RETURNED_NAN, math.nan)
        table[list(selection.samples)] = math.nan
        return table

    def _compute(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Scored:
        """Let TRL compute and gather the rewards, and decide what leaves. Collective."""
        scored = Scored()
        functions = self._trainer.reward_funcs
        examined = [
            checked(function, column, scored, functools.partial(self._failed_before, column))
            for column, function in enumerate(functions)
        ]
        with override_attributes(self._trainer, reward_funcs=examined):
            table = scored.table = original(*args, **kwargs)
        if table.dim() != 2 or table.shape[1] != len(functions) or len(table) % self._generations:
            # a subclass computes something else of the rewards: failures are None to it, as NaN is under TRL
            scored.table = table.masked_fill(table.isinf(), math.nan)
            return scored
        left = self._rows_left_out(table)
        if left or not bool(table.isfinite().all()):
            models = [column for column, function in enumerate(functions) if is_model(function)]
            scored.selection = select(table.tolist(), self._generations, models, left)
        return scored

    def _failed_before(self, column: int, completion_ids: Sequence[Sequence[int]]) -> Mapping[int, str]:
        """The rewards of this rank that failed when this rollout was scored before a recovery, by row."""
        if not self._is_training:
            return {}
        first, _ = self._own_rows(len(completion_ids))
        return self._earlier.rows(self._rollout, self._functions[column], first, completion_ids)

    def _rows_left_out(self, table: Any) -> set[int]:
        """The samples of all ranks that are masked whatever their rewards are. Collective if rows may leave,
        on every rank alike.
        """
        reasons = self._leaving()
        if reasons is None:
            return set()
        self._left = reasons
        assert len(reasons) * self._trainer.accelerator.num_processes == len(table)
        flags = table.new_tensor([float(bool(reason)) for reason in reasons])
        gathered = self._trainer.accelerator.gather(flags)
        return {row for row, left in enumerate(gathered.tolist()) if left}

    def _report(self, scored: Scored) -> None:
        selection = scored.selection
        first, end = self._own_rows(len(scored.table) // self._trainer.accelerator.num_processes)
        own = {}
        for number, (reason, column) in selection.samples.items():
            if first <= number < end:
                known = SampleFault(self._left[number - first] if reason == LEFT_OUT else reason)
                own[number] = known if column is None else scored.failed.get((number - first, column), known)
        nothing_left = self._is_training and selection.is_empty
        self._reporter.excluded(
            selection,
            own,
            step=self._step,
            rollout=self._rollout,
            evaluating=not self._is_training,
            steps_without_samples=self._steps_of_a_rollout if nothing_left else 0,
        )

    def _count_rollouts_without_reward(self, scored: Scored) -> None:
        """Warn at the first training rollout without one valid reward, and end the run after too many in a
        row.

        The table is the same on every rank, so all of them raise.

        Raises:
            RewardError: this was one too many.
        """
        if not scored.selection.none_valid:
            self._rollouts_without_reward = 0
            return
        self._rollouts_without_reward += 1
        if self._rollouts_without_reward == 1:
            self._first_without_reward = f"in step {self._step} {self._what_was_returned(scored)}"
            self._session.warn(
                f"no sample of a rollout has a valid reward: {self._first_without_reward};"
                f" {ROLLOUTS_WITHOUT_REWARD} such rollouts in a row end the run"
            )
        if self._rollouts_without_reward >= ROLLOUTS_WITHOUT_REWARD:
            raise RewardError(
                f"no valid reward in {ROLLOUTS_WITHOUT_REWARD} rollouts in a row;"
                f" {self._first_without_reward}"
            )

    def _what_was_returned(self, scored: Scored) -> str:
        """What this rank's reward functions have returned that have given no reward at all; or of all, if
        each has given some.
        """
        columns = range(scored.table.shape[1])
        broken = [column for column in columns if not bool(scored.table[:, column].isfinite().any())]
        said = []
        for column in broken or columns:
            found = scored.returned.get(column)  # None for a reward model
            text = describe(*found) if found is not None else "no finite number"
            said.append(f"reward function {self._functions[column]} returned {text}")
        return ", and ".join(said)

    @property
    def _is_training(self) -> bool:
        return bool(self._trainer.model.training)

    @property
    def _generations(self) -> int:
        name = "num_generations" if self._is_training else "num_generations_eval"
        return int(getattr(self._trainer, name, None) or 1)

    @property
    def _step(self) -> int:
        """The optimizer step that is being computed."""
        return int(self._trainer.state.global_step) + 1

    @property
    def _rollout(self) -> int:
        """The number of the rollout that is being scored: the micro-step for which it was generated, as the
        script has set their size."""
        micro_step = int(getattr(self._trainer, trainer_names.MICRO_STEP, 0))
        return micro_step // record_of(self._trainer.args).divided_by

    @property
    def _steps_of_a_rollout(self) -> int:
        arguments = self._trainer.args
        micro_steps = arguments.steps_per_generation * self._trainer.num_iterations
        return max(1, int(micro_steps) // int(arguments.gradient_accumulation_steps))

    def _own_rows(self, count: int) -> tuple[int, int]:
        """The first of this rank's samples in the rollout of all ranks, and the first of the next rank's."""
        first = int(self._trainer.accelerator.process_index) * count
        return first, first + count
