"""What a saved MemGen answers after it was loaded, in the form of its evaluation's file.

Torch is imported where it is used, because pytest's workers collect the tests that call this.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Rows = dict[str, list[dict[str, Any]]]
"""By variant: how long each answer is, and where memory was woven."""


def evaluated(output: Path) -> Rows:
    """Return what a recipe's evaluation has written."""
    found: Rows = {}
    for line in (output / "evaluation.jsonl").read_text().splitlines()[1:]:
        batch = json.loads(line)
        found.setdefault(batch["variant"], []).extend(
            {name: value for name, value in row.items() if name != "score"} for row in batch["rows"]
        )
    return found


def answered(output: Path, prompts: Sequence[Any]) -> Rows:
    """Return the same for what is loaded from the recipe's output, which answers all prompts at once."""
    import torch

    from grpo_run.trainers.memgen import load
    from grpo_run.trainers.memgen.evaluation import VARIANTS
    from grpo_run.trainers.memgen.generation import generate
    from grpo_run.trainers.memgen.model import WEAVE
    from grpo_run.trainers.memgen.saved import prompt_tokens

    torch.set_num_threads(1)  # as in ranks; more only wait for one another with tensors of this size
    loaded = load(output / "final")
    ids = [prompt_tokens(loaded.tokenizer, prompt) for prompt in prompts]
    found: Rows = {}
    for variant, mode in VARIANTS.items():
        answers = generate(loaded.memgen, ids, loaded.generation, mode)
        found[variant] = []
        for tokens, decisions in zip(answers.tokens, answers.decisions, strict=True):
            prompt, *after = [decision == WEAVE for decision in decisions]
            woven = zip(tokens, [*after, False], strict=True)  # no decision follows the last token
            found[variant].append({
                "tokens": len(tokens), "prompt": prompt,
                "delimiters": [[token, one] for token, one in woven if token in loaded.memgen.delimiters],
            })  # fmt: skip
    return found
