"""The ledger in a rank: what it has generated, which rows have left the loss, and what a step has used.

Lengths are written as soon as a rollout is generated, so that those of a rollout that fails later are known
too, and a step before the ranks vote on it. Rank 0 alone writes steps: the ranks agree on them. Changes
nothing of a rollout, and sends nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from grpo_run.runtime.features.ledger._async import AsyncLedger
from grpo_run.runtime.features.ledger._lines import pack, row_digest
from grpo_run.runtime.features.ledger._writer import Writer
from grpo_run.runtime.rank.points import CallPoints, RankFeature, RolloutPoints
from grpo_run.runtime.rank.session import Session
from grpo_run.runtime.upstream import async_grpo_names, rollout_names, trainer_names

REWARD, TRUNCATED = "no valid reward", "truncated"
"""Why rows have left the loss of which no feature says why: by masking, or by TRL's rule."""


class RolloutLedger:
    """Of one GRPO or RLOO trainer. A method with `original` is called around a method of the trainer."""

    def __init__(self, session: Session, points: CallPoints) -> None:
        self._trainer, self._session = points.trainer, session
        self.generations = int(self._trainer.num_generations)
        self._micro_steps = int(self._trainer.args.steps_per_generation * self._trainer.num_iterations)
        self._writer = Writer(session, points.train_call, self.generations, self._micro_steps)
        cuts = getattr(self._trainer.args, "mask_truncated_completions", False)
        self._longest = points.facts.max_completion_length if points.facts and cuts else None
        self._began = 0
        self._rows: Sequence[Mapping[str, Any]] = ()
        self._lengths: list[int] = []
        self.reasons: Callable[[], Sequence[str] | None] = lambda: None
        points.step_begins.append(self.begin_step)
        if session.is_main:
            points.step_ends.append(self.end_step)

    def begin_step(self, step: int) -> None:
        """Note where in the data a step begins."""
        self._writer.step_begins(step)
        self._began = self._micro_step

    def end_step(self, step: int) -> None:
        """Write what a finished step has used of the data."""
        self._writer.write("S", step, self._began, self._micro_step)

    @property
    def _micro_step(self) -> int:
        return int(getattr(self._trainer, trainer_names.MICRO_STEP))

    @property
    def _rollout(self) -> int:
        return self._micro_step // self._micro_steps

    def take(self, original: Callable[..., Any], rows: Any, *args: Any, **kwargs: Any) -> Any:
        """Keep the rows of the data set as the sampler has chosen them."""
        self._rows = rows if self._trainer.model.training and isinstance(rows, list) else ()
        result = original(rows, *args, **kwargs)
        self._rows = ()
        return result

    def generated(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Write prompts and lengths."""
        result = original(*args, **kwargs)
        tokens = rollout_names.tokens_of(result) if self._rows else None
        if tokens is None or len(tokens[1]) != len(self._rows):
            return result
        self._lengths = [len(row) for row in tokens[1]]
        first = self._session.rank * len(self._rows)
        begins = range(-first % self.generations, len(self._rows), self.generations)
        state = self._trainer.state
        self._writer.write(
            "R", self._rollout, int(state.epoch or 0), state.global_step + 1,
            "".join(row_digest(self._rows[row]) for row in begins), pack(self._lengths),
        )  # fmt: skip
        return result

    def scored(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Write which rows are not in the loss."""
        result = original(*args, **kwargs)
        mask = result.get(rollout_names.COMPLETION_MASK) if self._rows and isinstance(result, dict) else None
        if mask is None or len(mask) != len(self._lengths):
            return result
        if (tools := result.get(rollout_names.TOOL_MASK)) is not None:
            mask = mask * tools
        left: dict[str, list[int]] = defaultdict(list)
        said = self.reasons()
        reasons = said if said is not None and len(said) == len(mask) else [""] * len(mask)
        for row, (stays, reason) in enumerate(zip(mask.any(dim=1).tolist(), reasons, strict=True)):
            if not stays:
                cut = self._longest is not None and self._lengths[row] >= self._longest
                left[reason or (TRUNCATED if cut else REWARD)].append(row)
        if left:
            self._writer.write("M", self._rollout, left)
        return result


class LedgerPart(RankFeature):
    """The ledger at the points of a rank."""

    name = "ledger"

    def __init__(self) -> None:
        self._ledger: RolloutLedger | None = None

    def call(self, session: Session, points: CallPoints) -> None:
        """Write the ledger of a trainer that generates."""
        self._ledger = None
        counts = isinstance(getattr(points.trainer, trainer_names.MICRO_STEP, None), int)
        if points.facts is not None and points.facts.has_rollouts and counts:
            self._ledger = RolloutLedger(session, points)
        knows_order = async_grpo_names.knows_order(points.trainer)
        if knows_order:
            AsyncLedger(session, points)
        elif knows_order is not None and session.settings.attempt == 0:
            session.warn(async_grpo_names.UNKNOWN_ORDER)

    def rollouts(self, trainer: Any, session: Session, train_call: int, points: RolloutPoints) -> None:
        """See the rows before other features replace some, and what is left of them in the end."""
        if self._ledger is not None:
            points.inputs.append(self._ledger.take)
            points.generation.append(self._ledger.generated)
            points.scoring.append(self._ledger.scored)
            self._ledger.reasons = points.row_reasons


PART = LedgerPart()
