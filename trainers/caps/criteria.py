"""The stopping criterion that applies the caps of one turn inside transformers' `generate`.

`generation.py` passes one to each call. It returns one boolean per completion, so that a loop ends only its own
completion, and keeps where and why each was ended. Until a cap ends one, it costs a comparison of two integers a
token. Nothing is read from the device before `cuts`. Does not stop generation itself: transformers does when all
completions are done, under ZeRO-3 and FSDP on all ranks together.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from transformers import StoppingCriteria

from grpo_run.trainers.caps.end_reasons import Cut
from grpo_run.trainers.caps.repetition import Repetition
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
        self._rows = 0
        self._seen = prompt_length
        self._ended_itself: torch.Tensor | None = None
        self._capped: torch.Tensor | None = None
        self._length: torch.Tensor | None = None
        self._reason: torch.Tensor | None = None

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Return which completions a cap has ended."""
        self.steps += 1
        if self._capped is None:
            self._rows = input_ids.shape[0]
            zeros = torch.zeros(self._rows, dtype=torch.int64, device=input_ids.device)
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
        assert self._length is not None
        assert self._reason is not None
        assert self._ended_itself is not None
        new = input_ids[:, self._seen :]
        self._seen = input_ids.shape[1]
        for token in self._end_tokens:  # a model has a few
            self._ended_itself = self._ended_itself | (new == token).any(1)
        ended = rows & ~self._ended_itself & ~self._capped
        self._length = torch.where(ended, input_ids.shape[1] - self._prompt_length, self._length)
        self._reason = torch.where(ended, _REASONS.index(reason), self._reason)
        self._capped = self._capped | ended

    def cuts(self, lengths: list[int]) -> list[Cut | None]:
        """Return where and why each completion was ended; None for those that no cap has ended. Waits for the device.

        Args:
            lengths: of the completions as generated. Where generation looks one step ahead, a completion may
                have been ended beyond its last token; that does not count.
        """
        if self._length is None or self._reason is None:
            return [None] * len(lengths)
        ended, reasons = torch.stack((self._length, self._reason)).tolist()
        return [
            Cut(length=at, reason=_REASONS[reason]) if 0 < at <= length else None
            for at, reason, length in zip(ended, reasons, lengths, strict=True)
        ]
