"""The caps of one turn as stopping criteria of transformers' `generate`.

A turn gives a `CapCriteria` to its call of `generate`, or one to each part of a call that is divided
(`runtime/rank/rollouts/generate_calls.py`). It returns one boolean per completion, so that a loop ends only
its own completion, and keeps where and why each was ended. Until a cap ends one, it costs a comparison of two
integers a token; nothing is read from the device before `cuts`. Transformers stops when all completions are
done, under ZeRO-3 and FSDP on all ranks together.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from grpo_run.runtime.errors import ConfigError
from grpo_run.runtime.features.caps._configuration import CapSettings
from grpo_run.runtime.features.caps._rollout import CappedRollout, Cut
from grpo_run.runtime.rank.rollouts import generate_calls, limits
from grpo_run.runtime.rank.rollouts.limits import Repetition
from grpo_run.watchdog.observation import EndReason

_REASONS = (EndReason.repetition, EndReason.deadline)


class CapCriteria(StoppingCriteria):  # type: ignore[misc]
    """The caps of one turn.

    Args:
        prompt_length: columns of the prompt, padding included.
        end_tokens: the tokens that end a completion by itself.
        repetition: finds loops; None without that cap.
        out_of_time: asked after each token; receives the number of decoding steps of this turn.
    """

    def __init__(
        self,
        prompt_length: int,
        end_tokens: Collection[int],
        *,
        repetition: Repetition | None,
        out_of_time: Callable[[int], bool],
    ) -> None:
        self.steps = 0
        """Decoding steps of this turn so far."""
        self._prompt_length = prompt_length
        self._end_tokens = sorted(end_tokens)
        self._repetition = repetition
        self._out_of_time = out_of_time
        self._timed_out = False
        self._seen = prompt_length
        self._capped: torch.Tensor | None = None
        self._ended_itself: torch.Tensor
        self._length: torch.Tensor
        self._reason: torch.Tensor

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Return which completions a cap has ended."""
        self.steps += 1
        if self._capped is None:
            zeros = torch.zeros(len(input_ids), dtype=torch.int64, device=input_ids.device)
            self._length, self._reason = zeros, zeros
            self._ended_itself = self._capped = zeros.bool()
        if not self._timed_out and self._out_of_time(self.steps):
            self._timed_out = True
            self._end(torch.ones_like(self._capped), EndReason.deadline, input_ids)
        elif self._repetition is not None and self._repetition.is_due(input_ids.shape[1]):
            self._end(self._repetition(input_ids), EndReason.repetition, input_ids)
        return self._capped

    def _end(self, rows: torch.Tensor, reason: EndReason, input_ids: torch.Tensor) -> None:
        """End these completions, except those that have ended before."""
        assert self._capped is not None
        new = input_ids[:, self._seen :]
        self._seen = input_ids.shape[1]
        for token in self._end_tokens:  # a model has a few
            self._ended_itself = self._ended_itself | (new == token).any(1)
        ended = rows & ~self._ended_itself & ~self._capped
        self._length = torch.where(ended, input_ids.shape[1] - self._prompt_length, self._length)
        self._reason = torch.where(ended, _REASONS.index(reason), self._reason)
        self._capped = self._capped | ended

    def cuts(self, lengths: list[int]) -> list[Cut | None]:
        """Return where and why each completion was ended; None for those that no cap has ended. Waits for the
        device.

        Args:
            lengths: of the completions as generated. Where generation looks one step ahead, a completion may
                have been ended beyond its last token; that does not count.
        """
        if self._capped is None:
            return [None] * len(lengths)
        ended, reasons = torch.stack((self._length, self._reason)).tolist()
        return [
            Cut(length=at, reason=_REASONS[reason]) if 0 < at <= length else None
            for at, reason, length in zip(ended, reasons, lengths, strict=True)
        ]


class Turn:
    """One turn: the criterion that its call of `generate` gets; one for each part if it is divided.

    Code of the script may call `generate` several times, and generate in loops of `consensus.while_any`.

    Args:
        rollout: of the turn.
        window: in tokens, of the cap on repetition; None without it.
        of_script: the script's own code generates.
    """

    def __init__(self, rollout: CappedRollout, window: int | None, *, of_script: bool = False) -> None:
        self.rollout = rollout
        self._window = window
        self._of_script = of_script
        self._parts: list[tuple[int, CapCriteria]] = []
        """Rows and criterion of each part."""
        self._loops: list[int] = []
        """Turns of each loop of `consensus.while_any`."""

    @property
    def steps(self) -> int:
        """Decoding steps so far."""
        return sum(criteria.steps for _, criteria in self._parts) + sum(self._loops)

    @property
    def begun(self) -> bool:
        """Whether `generate` was called."""
        return bool(self._parts)

    @property
    def timed(self) -> bool:
        """Whether something was asked to end in time."""
        return self.begun or bool(self._loops)

    @property
    def rows(self) -> int:
        """Rows of all calls of `generate`."""
        return sum(rows for rows, _ in self._parts)

    def out_of_time(self, turns: int) -> bool:
        """Return whether a loop has no time left; see `limits.ended_by`."""
        if turns == 1:
            self._loops.append(0)
        self._loops[-1] = turns - 1
        return self.rollout.out_of_time(self.steps)

    def cuts(self, lengths: Sequence[int]) -> list[Cut | None]:
        """Return where and why each completion was ended, as `CapCriteria.cuts` does.

        Args:
            lengths: of the completions as generated.
        """
        cuts: list[Cut | None] = []
        for rows, criteria in self._parts:
            cuts += criteria.cuts(list(lengths[len(cuts) : len(cuts) + rows]))
        return cuts

    def add_to(self, arguments: dict[str, Any], part: bool) -> None:
        """Add a criterion to the arguments of a call.

        Args:
            part: the call is one part of a call.

        Raises:
            ConfigError: a second call in this turn: which completion a row belongs to is then not known.
        """
        if self._parts and not part and not self._of_script:
            raise ConfigError(
                "caps on repetition and time need a model that generates a batch in one call of transformers'"
                " `generate`; this model calls it several times. Use grpo_run.trainers.caps in its loop"
                " instead"
            )
        own = arguments.get("stopping_criteria") or []
        end_tokens = set(self.rollout.end_tokens)
        padding = getattr(arguments.get("generation_config"), "pad_token_id", None)
        if own and padding is not None:
            end_tokens.add(padding)  # the script's criteria end completions without a token of their own
        others = arguments.get("kwargs", {})
        prompts = others.get("input_ids", arguments.get("inputs"))
        if prompts is None:
            raise ConfigError("caps on repetition and time need the tokens of the prompts, as `input_ids`")
        rows, length = prompts.shape
        earlier = self.steps
        criteria = CapCriteria(
            length,
            end_tokens,
            repetition=None if self._window is None else Repetition(length, window=self._window),
            out_of_time=lambda steps: self.rollout.out_of_time(earlier + steps),
        )
        self._parts.append((rows, criteria))
        arguments["stopping_criteria"] = StoppingCriteriaList([*own, criteria])


@contextmanager
def turn_of_script(present: Turn) -> Iterator[None]:
    """Cap whatever the script's own code generates in the block, as far as that is seen."""
    with generate_calls.with_criteria(present.add_to), limits.ended_by(present.out_of_time):
        yield


def without_effect(turns: Sequence[Turn], settings: CapSettings, what: str) -> str | None:
    """Return which cap had nothing to end in code of the script, and what to do; None if all had.

    Args:
        turns: that the script's own code has generated.
        settings: the caps.
        what: generates.
    """
    if settings.repetition is not None and not any(one.begun for one in turns):
        return (
            f"--generation repetition: {what} does not call transformers' `generate`, and its tokens are not"
            " seen; remove the cap, and use grpo_run.trainers.caps.Repetition in its loop"
        )
    if settings.max_time is not None and not any(one.timed for one in turns):
        return (
            f"--generation max_time: {what} neither calls transformers' `generate` nor generates in a loop of"
            " consensus.while_any; remove the cap, or write the loop with while_any"
        )
    return None


@contextmanager
def turn(present: Turn) -> Iterator[None]:
    """Add the criterion of this turn to the next call of `generate` in the block.

    Raises:
        ConfigError: the block ended and transformers' `generate` was not called.
    """
    with generate_calls.with_criteria(present.add_to):
        yield
    if not present.begun:
        raise ConfigError(
            "caps on repetition and time did not take effect: the model does not generate with transformers'"
            " `generate`. Use grpo_run.trainers.caps in its loop instead"
        )
