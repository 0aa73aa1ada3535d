"""Reward functions for scripts to combine, and `whole_batch`, the mark of one that compares completions.

    from grpo_run.trainers.rewards import answer_format, correct_answer
    from trl.rewards import get_soft_overlong_punishment

    overlong = get_soft_overlong_punishment(max_completion_len=512, soft_punish_cache=128)
    GRPOTrainer(reward_funcs=[correct_answer, answer_format, overlong], ...)

Each is a reward function of its own, so TRL logs it under its own name, and `reward_weights` weighs it. The
reference answers are the data set's column `answer`. A completion is text, or a conversation whose last
message is the model's. Each takes time linear in the length of a completion, whatever it contains, and
scores a completion by itself, so none of them needs the mark.

Under `grpo-run launch`, reward functions can run in worker processes, so that one that hangs or crashes
costs its own samples and not the run. After a failure a function is called again with parts of its batch,
to find the samples that it fails on. Parts would change the rewards of a function marked `whole_batch`, so
all samples of its failed call are masked instead. The mark has no effect elsewhere. See
docs/guide/rewards.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any, TypeAlias

from grpo_run.runtime.rank.points import whole_batch

__all__ = ["answer_format", "completion_text", "correct_answer", "final_answer", "whole_batch"]

Completion: TypeAlias = str | Sequence[Mapping[str, Any]]

MARKER = "####"

_NUMBER = re.compile(
    r"""
    (?P<minus> (?<! [\w.] ) - \s? )? (?: [$€£] (?P<inner_minus> - )? )?
    (?P<digits> (?: [0-9]{1,3} (?: ,[0-9]{3} )+ (?![0-9]) | [0-9]+ ) (?: \.[0-9]+ )? | \.[0-9]+ )
    """,
    re.VERBOSE,
)


def completion_text(completion: Completion) -> str:
    """Return the text that the model generated: of a conversation, of its last message.

    A message without text (a call of a tool) is empty, and of one in parts the texts are joined.
    """
    if isinstance(completion, str):
        return completion
    content = completion[-1].get("content") if completion else None
    if isinstance(content, list):
        return "".join(str(part.get("text") or "") for part in content)
    return "" if content is None else str(content)


def final_answer(text: str) -> Decimal | None:
    """Return the number on the line of the last `####`, or None.

    Currency signs, thousands separators, units, emphasis and a final period are ignored. A line with two
    numbers ("5 + 3 = 8", "3/4", "12,13") has no answer: a reward for one of several numbers would teach the
    model to list candidates.
    """
    _, marker, tail = text.rpartition(MARKER)
    numbers = _numbers(tail.lstrip().partition("\n")[0]) if marker else iter(())
    first = next(numbers, None)
    return first if next(numbers, None) is None else None


def correct_answer(completions: Sequence[Completion], answer: Sequence[Any], **columns: Any) -> list[float]:
    """Return 1 if the number after the last `####` equals the reference answer, else 0.

    Args:
        answer: numbers, or texts of numbers: `72.00` and `$72` equal `72`. A solution that ends in `####
            number`, as in GSM8K, is the number.

    Raises:
        ValueError: a reference answer is no number.
    """
    return [
        float(final_answer(completion_text(completion)) == _reference(expected))
        for completion, expected in zip(completions, answer, strict=True)
    ]


def answer_format(completions: Sequence[Completion], **columns: Any) -> list[float]:
    """Return 1 if the completion has one `####` line, at its end, with exactly one number, else 0."""
    scores = []
    for completion in completions:
        text = completion_text(completion).rstrip()
        _, *tails = text.split(MARKER)
        scores.append(float(len(tails) == 1 and "\n" not in tails[0] and final_answer(text) is not None))
    return scores


def _reference(answer: Any) -> Decimal:
    text = str(answer)
    number = final_answer(text if MARKER in text else f"{MARKER} {text}")
    if number is None:
        raise ValueError(f"the reference answer {text[:80]!r} is no number")
    return number


def _numbers(text: str) -> Iterator[Decimal]:
    for match in _NUMBER.finditer(text.replace("−", "-")):
        value = Decimal(match["digits"].replace(",", ""))
        yield -value if match["minus"] or match["inner_minus"] else value
