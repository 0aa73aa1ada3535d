"""The three switches of the experiment, and the four methods of the report that it repeats.

Used by `rloo_memory.py` and its script. Pure; imports neither torch nor TRL.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal, get_args

Expansion = Literal["interleaved", "in_turn", "sampler", "text"]
"""How k completions come from one prompt. Its tokens are repeated on the device, each k times in a row as TRL
orders them; or generated from k times, one response of each prompt after another; or the data sampler repeats
its index, as TRL does now; or its tokens are decoded, the text is repeated, and tokenized again."""
Scores = Literal["kept", "dropped", "reduced"]
"""What becomes of the scores of generation, one float for each row, token and word of the vocabulary:
stacked, joined, and kept until the end of the step, as TRL 0.21 did; or not asked for, as in TRL now; or
reduced to log-probabilities of the sampled tokens, part by part, before the next part is generated."""
Head = Literal["fused", "full"]
"""How log-probabilities come from hidden states: by TRL's fused head, in chunks without whole logits; or by
the model's own, with the logits of all rows and positions at once."""
CHOICES = {"expansion": get_args(Expansion), "scores": get_args(Scores), "head": get_args(Head)}


@dataclass(frozen=True, kw_only=True)
class Switches:
    """One setting of the experiment."""

    expansion: Expansion
    scores: Scores
    head: Head

    def __str__(self) -> str:
        return f"{self.expansion}, {self.scores}, {self.head}"


METHODS = {
    "basic": Switches(expansion="interleaved", scores="kept", head="full"),
    "lazy": Switches(expansion="in_turn", scores="kept", head="full"),
    "repeat_sampler": Switches(expansion="sampler", scores="kept", head="full"),
    "string": Switches(expansion="text", scores="reduced", head="full"),
}
"""The methods by name. `string` differs from `basic` in two switches."""
ONLY_SCORES = replace(METHODS["basic"], scores="reduced")
ONLY_TEXT = replace(METHODS["basic"], expansion="text")
"""Between `basic` and `string`: one of the two switches each."""


def settings_for(methods: Collection[str], *, grid: bool) -> list[Switches]:
    """Return the settings to measure for each k, each once, methods first.

    With both `basic` and `string` there are also the two settings between them.

    Args:
        grid: also all other settings.
    """
    wanted = [METHODS[name] for name in methods]
    if {"basic", "string"} <= set(methods):
        wanted += [ONLY_SCORES, ONLY_TEXT]
    if grid:
        settings = (dict(zip(CHOICES, one, strict=True)) for one in itertools.product(*CHOICES.values()))
        wanted += [Switches(**one) for one in settings]
    return list(dict.fromkeys(wanted))


def name_of(switches: Switches) -> str:
    """Return the name of a method, or the three switches."""
    return next((name for name, method in METHODS.items() if method == switches), str(switches))
