"""Add to transformers' `generate` during a trainer's turn: a stopping criterion, and the division into parts.

`install` wraps `GenerationMixin.generate` once. `turn` says for which block a criterion is added to those that the script
passes, and `in_parts` for which block a call is divided (`parts.py`); each part then has a criterion of its own. Only the
outermost call in this thread is changed: a model that a tool or a reward uses, or an assistant model inside the call, generates
as ever. Called by `capping.py` and `hooks/rollout_hooks.py`. Does not know what the criterion does.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from transformers import GenerationMixin, StoppingCriteriaList

from grpo_run.runtime.errors import ConfigError
from grpo_run.trainers.caps.calls.parts import divided, joined
from grpo_run.trainers.caps.criteria import CapCriteria
from grpo_run.trainers.caps.end_reasons import Cut

MakeCriteria = Callable[[int, Collection[int], int], CapCriteria]
"""Makes a criterion, from the length of the prompt, the tokens that end a completion or fill it up, and the decoding steps of the
turn's earlier parts."""


class Turn:
    """One turn: the criterion that its call of `generate` gets; one for each part if it is divided.

    Args:
        criteria: makes a criterion.
        end_tokens: the tokens that end a completion.
    """

    def __init__(self, criteria: MakeCriteria, end_tokens: Collection[int]) -> None:
        self._make = criteria
        self._end_tokens = end_tokens
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

    def add_to(self, arguments: dict[str, Any], *, part: bool = False) -> None:
        """Add a criterion to the arguments of a call.

        Args:
            part: the call is one part of a call.

        Raises:
            ConfigError: a second call in this turn: which completion a row belongs to is then not known.
        """
        if self._parts and not part:
            raise ConfigError(
                "caps on repetition and time need a model that generates a batch in one call of transformers'"
                " `generate`; this model calls it several times. Use grpo_run.trainers.caps in its loop instead"
            )
        own = arguments.get("stopping_criteria") or []
        end_tokens = set(self._end_tokens)
        config = arguments.get("generation_config")
        padding = getattr(config, "pad_token_id", None)
        if own and padding is not None:
            end_tokens.add(padding)  # the script's criteria end completions without a token of their own
        others = arguments.get("kwargs", {})
        prompts = others["input_ids"] if "input_ids" in others else arguments["inputs"]
        criteria = self._make(prompts.shape[1], end_tokens, self.steps)
        self._parts.append((len(prompts), criteria))
        arguments["stopping_criteria"] = StoppingCriteriaList([*own, criteria])


class Parts:
    """Into how many parts the calls of a block are divided.

    Attributes:
        calls: calls of `generate` in the block.
        whole: calls that could not be divided.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.calls = 0
        self.whole = 0


_INSTALLED = "_grpo_run_caps"
_turn: ContextVar[Turn | None] = ContextVar("grpo_run_turn", default=None)
_parts: ContextVar[Parts | None] = ContextVar("grpo_run_parts", default=None)


@contextmanager
def turn(present: Turn) -> Iterator[None]:
    """Add the criterion of this turn to the next call of `generate` in the block.

    Raises:
        ConfigError: the block ended and transformers' `generate` was not called.
    """
    token = _turn.set(present)
    try:
        yield
    finally:
        _turn.reset(token)
    if not present.begun:
        raise ConfigError(
            "caps on repetition and time did not take effect: the model does not generate with transformers'"
            " `generate`. Use grpo_run.trainers.caps in its loop instead"
        )


@contextmanager
def in_parts(count: int) -> Iterator[Parts]:
    """Divide each outermost call of `generate` in the block into parts; yields what came of it.

    Args:
        count: parts, at most one for each row.
    """
    parts = Parts(count)
    token = _parts.set(parts)
    try:
        yield parts
    finally:
        _parts.reset(token)


def install() -> None:
    """Let transformers' `generate` look for a turn and for parts. A second call has no effect.

    It stays: a script may keep the method in a function of its own, which would then be another one than that of the class.
    """
    original = GenerationMixin.generate
    if getattr(original, _INSTALLED, False):
        return
    signature = inspect.signature(original)

    @functools.wraps(original)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        present, parts = _turn.get(), _parts.get()
        if present is None and parts is None:
            return original(self, *args, **kwargs)
        call = signature.bind_partial(self, *args, **kwargs)
        tokens = _turn.set(None), _parts.set(None)
        try:
            return _generate(original, call, present, parts)
        finally:
            _turn.reset(tokens[0])
            _parts.reset(tokens[1])

    setattr(generate, _INSTALLED, True)
    GenerationMixin.generate = generate


def _generate(
    original: Callable[..., Any], call: inspect.BoundArguments, turn: Turn | None, parts: Parts | None
) -> Any:
    """Generate, in one call or in parts, each with its criterion."""
    calls = [call.arguments]
    if parts is not None:
        parts.calls += 1
        calls = divided(call.arguments, parts.count) or calls
        parts.whole += len(calls) == 1 and parts.count > 1
    results = []
    for arguments in calls:
        if turn is not None:
            turn.add_to(arguments, part=len(calls) > 1)
        call.arguments = arguments
        results.append(original(*call.args, **call.kwargs))
    return results[0] if len(results) == 1 else joined(results, calls[0])
