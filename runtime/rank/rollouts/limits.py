"""What ends a generation: a time limit, and the detection of completions that repeat themselves.

For loops that a script writes itself of generation, and for features that end completions of a
trainer. Neither interrupts anything. Importing this module does not import torch.

`Deadline` is the time of this rank alone: a loop with collectives ends on all ranks together only through
`trainers/consensus.py`, or through generation that all ranks leave together.

`Repetition` works on a whole batch on the batch's device. It compares each token with the one p positions
before, for every period p up to `MAX_PERIOD`, and keeps two figures for each completion and period: the
length of the present run of equal tokens, and the number of equal tokens in a sliding window. New tokens are
compared in blocks, so a token costs a constant number of operations, and nothing waits for the device. It
does not know where a completion has ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from grpo_run.runtime.errors import UsageError
from grpo_run.watchdog.observation import LEAST_LOOP_TOKENS, USUAL_LOOP_TOKENS

if TYPE_CHECKING:
    import torch

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


OutOfTime = Callable[[int], bool]
"""Asked after each step of decoding, with their number; returns whether the time of this rank is over."""
_out_of_time: ContextVar[OutOfTime | None] = ContextVar("grpo_run_out_of_time", default=None)


@contextmanager
def ended_by(out_of_time: OutOfTime) -> Iterator[None]:
    """Let the loops of `consensus.while_any` in the block end when the time is over on every rank."""
    token = _out_of_time.set(out_of_time)
    try:
        yield
    finally:
        _out_of_time.reset(token)


def out_of_time(turns: int) -> bool:
    """Return whether a loop has no time left on this rank.

    Args:
        turns: of the loop so far, with the one that is about to begin.
    """
    ask = _out_of_time.get()
    return ask is not None and ask(turns)


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

    def __init__(self, prompt_length: int, *, window: int = USUAL_LOOP_TOKENS) -> None:
        if window < LEAST_LOOP_TOKENS:
            raise UsageError(f"a repetition window of {window} tokens: expected at least {LEAST_LOOP_TOKENS}")
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
        import torch

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
        import torch

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


class Deadline:
    """A time limit that begins now.

    Args:
        seconds: how long the limit is.
        clock: returns the time in seconds; it never goes back.

    Raises:
        UsageError: the limit is not above 0.
    """

    def __init__(self, seconds: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        if not seconds > 0:
            raise UsageError(f"a deadline of {seconds} s: expected more than 0")
        self.seconds = seconds
        self._clock = clock
        self._end = clock() + seconds

    def passed(self) -> bool:
        """Return whether the time is over on this rank."""
        return self._clock() >= self._end
