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
from grpo_run.runtime.features.caps._rollout import CappedRollout, Cut
from grpo_run.runtime.rank.rollouts import generate_calls
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

    Args:
        rollout: of the turn.
        window: in tokens, of the cap on repetition; None without it.
    """

    def __init__(self, rollout: CappedRollout, window: int | None) -> None:
        self.rollout = rollout
        self._window = window
        self._parts: list[tuple[int, CapCriteria]] = []
        """Rows and criterion of each part."""

    @property
    def steps(self) -> int:
        """Decoding steps so far."""
        return sum(criteria.steps for _, criteria in self._parts)

    @property
    def begun(self) -> bool:
        """Whether `generate` was called."""
        return bool(self._parts)

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
        if self._parts and not part:
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
