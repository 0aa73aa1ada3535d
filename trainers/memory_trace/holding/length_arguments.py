"""Which arguments of a call in the script have chosen the length of a batch. Pure, except for reading the source.

Used by `padding.py` with the line at which a mask was made.
"""

from __future__ import annotations

import ast

from grpo_run.trainers.memory_trace.holding.sources import parsed

LENGTHS = ("padding", "max_length", "pad_to_multiple_of")
"""Arguments of transformers' tokenizers and collators that choose a length, and of functions that pass them on."""
MOST_CHARACTERS = 120


def length_arguments(file: str, line: int) -> str | None:
    """Return the call at a line with its arguments that choose a length, as `tokenizer(padding="max_length")`.

    None if there is no such call, or more than one, or if the source cannot be read.
    """
    tree = parsed(file)
    if tree is None:
        return None
    found = [
        (node, chosen)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and node.lineno <= line <= (node.end_lineno or node.lineno)
        if (chosen := [one for one in node.keywords if one.arg in LENGTHS])
    ]
    if len(found) != 1:
        return None
    ((call, chosen),) = found
    arguments = ", ".join(f"{one.arg}={ast.unparse(one.value)}" for one in chosen)
    text = f"{ast.unparse(call.func)}({arguments})".replace("'", '"')
    return text if len(text) <= MOST_CHARACTERS and "\n" not in text else None
