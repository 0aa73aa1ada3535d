"""Count on the board what the rollouts of a trainer generate: tokens, completions, and why these ended.

`runtime/rank/hooks/_rollout_hooks.py` puts the handler around `_generate`. Rollouts of an evaluation count
too. Reads only what the trainer returns, and the reasons that features know; changes neither.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

from grpo_run.runtime.board.slot_writer import SlotWriter
from grpo_run.runtime.rank.points import EndReasons
from grpo_run.runtime.upstream import rollout_names
from grpo_run.runtime.upstream.patches import Handler
from grpo_run.watchdog.observation import EndReason


def counted(trainer: Any, slot: SlotWriter, ends: EndReasons) -> Handler:
    """Return a handler that counts the rollouts of a trainer.

    Args:
        ends: says why completions ended; otherwise their tokens tell.
    """

    def count(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Count what was generated."""
        generated = original(*args, **kwargs)
        found = rollout_names.tokens_of(generated)
        if found is None:
            return generated
        prompts, completions = found
        reasons = ends()
        if reasons is None:
            end_tokens = rollout_names.end_tokens(trainer)
            longest = getattr(trainer, "max_completion_length", None) or sys.maxsize
            cut = sum(len(tokens) >= longest and tokens[-1] not in end_tokens for tokens in completions)
            counts = {EndReason.length: cut, EndReason.eos: len(completions) - cut}
        else:
            counts = Counter(reasons)
        prompt_tokens = sum(map(len, prompts))
        slot.prompt_tokens += prompt_tokens
        slot.prompt_length = prompt_tokens / len(prompts) if prompts else math.nan
        slot.tokens_generated += sum(map(len, completions))
        for reason, number in counts.items():
            name = f"ended_{reason.value}"
            setattr(slot, name, getattr(slot, name) + number)
        slot.publish()
        return generated

    return count
