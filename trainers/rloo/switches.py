"""The three switches of the experiment, and the four methods of the report that it repeats.

Used by the script and by `grpo-run bench memory`. Pure; imports neither torch nor TRL.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum


class Expansion(str, Enum):
    """How k completions come from one prompt."""

    interleaved = "interleaved"
    """The prompt's tokens are repeated on the device, each k times in a row, as TRL orders them."""
    in_turn = "in_turn"
    """The prompts' tokens are generated from k times, one response of each prompt after another."""
    sampler = "sampler"
    """The data sampler repeats the index of the prompt, as TRL does now."""
    text = "text"
    """The prompt's tokens are decoded, the text is repeated, and tokenized again."""


class Scores(str, Enum):
    """What becomes of the scores of generation, one float for each row, token and word of the vocabulary."""

    kept = "kept"
    """Stacked, joined, and kept until the end of the step, as TRL 0.21 did."""
    dropped = "dropped"
    """Not asked for, as in TRL now."""
    reduced = "reduced"
    """Reduced to log-probabilities of the sampled tokens, part by part, before the next part is generated."""


class Head(str, Enum):
    """How log-probabilities come from hidden states."""

    fused = "fused"
    """TRL's fused head: in chunks, without whole logits."""
    full = "full"
    """The model's own head: the logits of all rows and positions at once."""


@dataclass(frozen=True, kw_only=True)
class Switches:
    """One setting of the experiment."""

    expansion: Expansion
    scores: Scores
    head: Head

    def __str__(self) -> str:
        return f"{self.expansion.value}, {self.scores.value}, {self.head.value}"


METHODS = {
    "basic": Switches(expansion=Expansion.interleaved, scores=Scores.kept, head=Head.full),
    "lazy": Switches(expansion=Expansion.in_turn, scores=Scores.kept, head=Head.full),
    "repeat_sampler": Switches(expansion=Expansion.sampler, scores=Scores.kept, head=Head.full),
    "string": Switches(expansion=Expansion.text, scores=Scores.reduced, head=Head.full),
}
"""The methods by name. `string` differs from `basic` in two switches."""
ONLY_SCORES = Switches(expansion=Expansion.interleaved, scores=Scores.reduced, head=Head.full)
ONLY_TEXT = Switches(expansion=Expansion.text, scores=Scores.kept, head=Head.full)
"""Between `basic` and `string`: one of the two switches each."""


def all_switches() -> Iterator[Switches]:
    """Yield the whole grid."""
    for expansion, scores, head in itertools.product(Expansion, Scores, Head):
        yield Switches(expansion=expansion, scores=scores, head=head)
