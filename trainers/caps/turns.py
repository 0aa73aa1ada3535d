"""Which completions a turn of an agent continues.

TRL's tool loop generates again for the completions that called a tool, and passes only their prompts. Each of these
begins with the prompt and the completion so far. Pure; called by `rollout.py`.
"""

from __future__ import annotations

from collections.abc import Sequence


def continued(sequences: Sequence[Sequence[int]], prompts: Sequence[Sequence[int]]) -> list[int]:
    """Return for each prompt of a turn the index of the completion that it continues, in increasing order.

    Equal completions of one prompt cannot be told apart; the first of them is named.

    Args:
        sequences: prompt and completion so far of each completion.
        prompts: of the turn, in the order of the completions.

    Raises:
        ValueError: a prompt continues none of the completions after the previous one.
    """
    found: list[int] = []
    for prompt in prompts:
        first = found[-1] + 1 if found else 0
        for index in range(first, len(sequences)):
            so_far = sequences[index]
            if len(so_far) <= len(prompt) and list(prompt[: len(so_far)]) == list(so_far):
                found.append(index)
                break
        else:
            raise ValueError(f"prompt {len(found)} of the turn continues no completion after {first - 1}")
    return found
