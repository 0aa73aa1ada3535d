"""One rollout under caps: its deadline, its turns, and why and where each completion ended.

`_capping.py` makes one for each `_generate` of a trainer. A rollout has one turn, or several if completions
call tools; the deadline covers all of them. `end_reason` is pure. Knows nothing of trainers, and
does not decide whether a completion takes part in the loss.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from grpo_run.runtime.rank.rollouts.limits import Deadline
from grpo_run.watchdog.observation import EndReason

CAPPED = frozenset({EndReason.repetition, EndReason.deadline})
"""Reasons for which a completion is cut. Without the cap it would have gone on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """Where and why a cap ended a completion.

    Args:
        length: tokens of the completion that were generated.
    """

    length: int
    reason: EndReason


def end_reason(
    tokens: Sequence[int], at: Cut | None, *, end_tokens: Collection[int], max_length: int
) -> EndReason:
    """Return why a completion ended.

    Args:
        tokens: as the trainer has it, after it was cut.
        at: where a cap ended it, if one did.
        end_tokens: the tokens that end a completion.
        max_length: in tokens.
    """
    if at is not None and at.length <= len(tokens):
        return at.reason
    if tokens and tokens[-1] in end_tokens:
        return EndReason.eos
    return EndReason.length if len(tokens) >= max_length else EndReason.eos


@dataclass(frozen=True, kw_only=True)
class DeadlineDecision:
    """What the deadline did to a rollout.

    Args:
        steps: decoding steps of the rollout, over all turns.
        timed_out_after: decoding steps after which it was ended; None if it ended itself.
    """

    steps: int
    timed_out_after: int | None

    def over(self, steps: int) -> bool | None:
        """Return whether the rollout is over after so many steps; None where it has become another one.

        A rollout that once ended itself and now goes on longer is another one: it was sampled with other
            seeds.
        """
        if self.timed_out_after is not None:
            return steps >= self.timed_out_after
        return False if steps <= self.steps else None


@dataclass(kw_only=True)
class _Completion:
    """One completion so far.

    Args:
        sequence: prompt and completion, with what tools returned.
    """

    prompt_length: int
    sequence: list[int]
    reason: EndReason


@dataclass(kw_only=True)
class CappedRollout:
    """One rollout.

    Args:
        end_tokens: the tokens that end a completion.
        max_length: of a completion in tokens, over all turns.
        deadline: None without that cap.
        decided: what the deadline did when this rollout was generated in an earlier attempt; None in the
            first.
    """

    end_tokens: Collection[int]
    max_length: int
    deadline: Deadline | None = None
    decided: DeadlineDecision | None = None
    steps: int = field(default=0, init=False)
    """Decoding steps of the turns that have ended; the caller adds them."""
    timed_out_after: int | None = field(default=None, init=False)
    """Decoding steps after which the deadline ended the rollout."""
    _completions: list[_Completion] = field(default_factory=list, init=False)

    def out_of_time(self, steps: int) -> bool:
        """Return whether the deadline ends the rollout now.

        Args:
            steps: decoding steps of the present turn.
        """
        if self.deadline is None:
            return False
        total = self.steps + steps
        over = None if self.decided is None else self.decided.over(total)
        if over is None:
            over = self.deadline.passed()
        if not over:
            return False
        if self.timed_out_after is None:
            self.timed_out_after = total
        return True

    def end_turn(
        self,
        prompts: Sequence[Sequence[int]],
        completions: Sequence[Sequence[int]],
        cuts: Sequence[Cut | None],
    ) -> list[list[int]]:
        """Record a turn, and return its completions cut where a cap ended them.

        Args:
            prompts: of the turn, one for each completion.
            completions: as generated.
            cuts: where a cap ended each.
        """
        # no end-of-sequence token is added, so the trainer takes a completion for what it is: not finished
        result = [
            list(tokens if one is None else tokens[: one.length])
            for tokens, one in zip(completions, cuts, strict=True)
        ]
        if self._completions:
            indices = continued([one.sequence for one in self._completions], prompts)
        else:
            self._completions = [
                _Completion(prompt_length=len(prompt), sequence=[], reason=EndReason.eos)
                for prompt in prompts
            ]
            indices = list(range(len(prompts)))
        for index, prompt, tokens, one in zip(indices, prompts, result, cuts, strict=True):
            completion = self._completions[index]
            # a trainer cuts what goes beyond the maximum over all turns
            left = self.max_length - (len(prompt) - completion.prompt_length)
            kept = tokens[: max(0, left)]
            completion.reason = end_reason(kept, one, end_tokens=self.end_tokens, max_length=left)
            completion.sequence = [*prompt, *kept]
        return result

    @property
    def reasons(self) -> tuple[EndReason, ...]:
        """Why each completion ended, in the order of the trainer's completions."""
        return tuple(completion.reason for completion in self._completions)


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
