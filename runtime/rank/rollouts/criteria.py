"""The stopping criterion for one turn of transformers' `generate`, and the detection of repetitions.

`generate_calls.py` passes a `CapCriteria` to each call. It returns one boolean per completion, so that a
loop ends only its own completion, and keeps where and why each was ended. Until a cap ends one, it costs a
comparison of two integers a token; nothing is read from the device before `cuts`. Transformers stops when
all completions are done, under ZeRO-3 and FSDP on all ranks together.

`Repetition` works on a whole batch on the batch's device; hand-written generation loops call it, too. It
compares each token with the one p positions before, for every period p up to `MAX_PERIOD`, and keeps two
figures for each completion and period: the length of the present run of equal tokens, and the number of
equal tokens in a sliding window. New tokens are compared in blocks, so a token costs a constant number of
operations, and nothing waits for the device. It ends no completion, and does not know where one has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from transformers import StoppingCriteria

from grpo_run.runtime.errors import UsageError
from grpo_run.runtime.rank.rollouts._rollout import Cut
from grpo_run.runtime.rank.rollouts.caps_settings import DEFAULT_WINDOW, MIN_WINDOW
from grpo_run.watchdog.observation import EndReason

MAX_PERIOD = 256
"""Longest period in tokens that is looked for."""
LARGEST_BLOCK = 16
"""Most tokens between two comparisons. On a GPU each comparison launches about a dozen kernels."""
DRIFT_WINDOWS = 4
"""A loop that changes slowly is looked for in this many windows."""
DRIFT_SHARE = 0.95
"""Share of equal tokens that makes a loop of them. With 0.9, ten times as many samples of real text were
taken for one.
"""


class Repetition:
    """Completions of one batch that are in a loop.

    A completion is in a loop if its last tokens repeat a sequence of p tokens exactly, at least twice after
    its first occurrence and for about `window` tokens. It is found at most three periods and a window after
    it began. A loop that changes slowly, such as a sentence with a counter, is found if 19 of 20 tokens equal
    the token p positions before, over four windows and at least two periods.

    Args:
        prompt_length: how many columns of the batch are the prompt. They are not compared.
        window: tokens that a loop must have lasted, at least 8. Tables and source code repeat themselves,
            too, so a short window ends some healthy completions.

    Raises:
        UsageError: the window is too short.
    """

    def __init__(self, prompt_length: int, *, window: int = DEFAULT_WINDOW) -> None:
        if window < MIN_WINDOW:
            raise UsageError(f"a repetition window of {window} tokens: expected at least {MIN_WINDOW}")
        self.window = window
        self._prompt_length = prompt_length
        self._block = max(1, min(LARGEST_BLOCK, window // 4))
        self._compared = 0
        self._looping: torch.Tensor | None = None

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return which completions are in a loop, or have been.

        Args:
            tokens: prompts and completions so far, one per row; rows grow and stay where they are.

        Returns:
            One boolean per row, on the device of `tokens`. Do not modify it.
        """
        if self._looping is None:
            self._begin(tokens)
            assert self._looping is not None
        if tokens.shape[0] != self._looping.shape[0]:
            raise UsageError(
                f"Repetition was called with {tokens.shape[0]} completions after {self._looping.shape[0]}:"
                " make a new one for each batch"
            )
        while self.is_due(tokens.shape[1]):
            self._looping = self._compare(tokens, self._looping)
        return self._looping

    def is_due(self, length: int) -> bool:
        """Return whether a call with rows of this length compares tokens, or only returns what is known."""
        return length - self._prompt_length - self._compared >= self._block

    def _begin(self, tokens: torch.Tensor) -> None:
        rows, device, block = tokens.shape[0], tokens.device, self._block
        # entry i is for the period MAX_PERIOD - i, as the comparison yields them
        periods = torch.arange(MAX_PERIOD, 0, -1, device=device)
        # a loop begins inside a block, so that up to two blocks less one token are not counted
        self._run_needed = torch.clamp(-(-2 * periods // block), min=self.window // block - 1).to(torch.int32)
        self._drift_blocks = -(-torch.clamp(2 * periods, min=DRIFT_WINDOWS * self.window) // block)
        self._drift_needed = torch.ceil(self._drift_blocks * block * DRIFT_SHARE).to(torch.int32)
        self._every_period = torch.arange(MAX_PERIOD, device=device)
        self._looping = torch.zeros(rows, dtype=torch.bool, device=device)
        self._run = torch.zeros(rows, MAX_PERIOD, dtype=torch.int32, device=device)
        self._equal = torch.zeros_like(self._run)
        self._places = -(-max(2 * MAX_PERIOD, DRIFT_WINDOWS * self.window) // block) + 1
        self._history = torch.zeros(self._places, rows, MAX_PERIOD, dtype=torch.int32, device=device)

    def _compare(self, tokens: torch.Tensor, looping: torch.Tensor) -> torch.Tensor:
        """Compare the next block, and return which completions are in a loop, or have been."""
        block, first = self._block, self._prompt_length + self._compared
        known = min(self._compared, MAX_PERIOD)
        recent = tokens[:, first - known : first + block]
        if known < MAX_PERIOD:
            recent = torch.nn.functional.pad(recent, (MAX_PERIOD - known, 0), value=-1)
        windows = recent.unfold(1, MAX_PERIOD + 1, 1)
        equal = (windows[..., :MAX_PERIOD] == windows[..., MAX_PERIOD:]).sum(1).to(torch.int32)
        self._run = torch.where(equal == block, self._run + 1, 0)
        self._equal = self._equal + equal
        self._compared += block
        now = self._compared // block
        self._history[now % self._places] = self._equal
        before = self._history[(now - self._drift_blocks) % self._places, :, self._every_period].T
        found = (self._run >= self._run_needed) | (self._equal - before >= self._drift_needed)
        return looping | found.any(1)


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
