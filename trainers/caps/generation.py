"""Passes a stopping criterion to transformers' `generate`, for the length of one turn of a trainer.

`install` wraps `GenerationMixin.generate` once, and `turn` says for which block a criterion is added to those
that the script passes. Only the outermost call in this thread gets it: a model that a tool or a reward uses, or an
assistant model inside the call, generates as ever. Called by `capping.py`. Does not know what the criterion does.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from transformers import GenerationMixin, StoppingCriteriaList

from grpo_run.runtime.errors import ConfigError
from grpo_run.trainers.caps.criteria import CapCriteria


class Turn:
    """One turn: the criterion that its call of `generate` gets.

    Args:
        criteria: makes it, from the length of the prompt and the tokens that end a completion or fill it up.
        end_tokens: the tokens that end a completion.
    """

    def __init__(
        self, criteria: Callable[[int, Collection[int]], CapCriteria], end_tokens: Collection[int]
    ) -> None:
        self.criteria: CapCriteria | None = None
        self._make = criteria
        self._end_tokens = end_tokens

    def add_to(self, arguments: dict[str, Any]) -> None:
        """Add the criterion to the arguments of a call.

        Raises:
            ConfigError: a second call in this turn: which completion a row belongs to is then not known.
        """
        if self.criteria is not None:
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
        self.criteria = self._make(prompts.shape[1], end_tokens)
        arguments["stopping_criteria"] = StoppingCriteriaList([*own, self.criteria])


_INSTALLED = "_grpo_run_caps"
_turn: ContextVar[Turn | None] = ContextVar("grpo_run_turn", default=None)


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
    if present.criteria is None:
        raise ConfigError(
            "caps on repetition and time did not take effect: the model does not generate with transformers'"
            " `generate`. Use grpo_run.trainers.caps in its loop instead"
        )


def install() -> None:
    """Let transformers' `generate` look for a turn. A second call has no effect.

    It stays: a script may keep the method in a function of its own, which would then be another one than that of the class.
    """
    original = GenerationMixin.generate
    if getattr(original, _INSTALLED, False):
        return
    signature = inspect.signature(original)

    @functools.wraps(original)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        present = _turn.get()
        if present is None:
            return original(self, *args, **kwargs)
        call = signature.bind_partial(self, *args, **kwargs)
        present.add_to(call.arguments)
        token = _turn.set(None)
        try:
            return original(*call.args, **call.kwargs)
        finally:
            _turn.reset(token)

    setattr(generate, _INSTALLED, True)
    GenerationMixin.generate = generate
