"""The lines of a rank's ledger: JSON arrays whose first element says of what kind a line is.

    ["B", call, attempt, step, ranks, generations, micro-steps]  a call begins or goes on after this step
    ["R", rollout, epoch, step, prompts, lengths]                this rank has generated its rows of a rollout
    ["M", rollout, {reason: rows}]                               these rows have left the loss
    ["S", step, begin, end]                                      a step has used these micro-steps (rank 0)

and of AsyncGRPO, by rank 0 alone, where a position is the number of a prompt over all passes of the data:

    ["Q", position, length, done, partial]  from here on prompts are drawn but those of `done`, from data of
                                            this length, 0 for a stream; those of `partial` go on with what is
                                            left of them
    ["A", step, reason, part, ...]          a step has trained these rows, or, for a reason, they were left
                                            out until then: for each prompt its digest, and in the same text
                                            its position and the lengths

A rollout is numbered by its first micro-step, divided by the micro-steps that a rollout serves. `prompts` has
`DIGEST_CHARACTERS` for each group that begins among the rows. Lengths are numbers of tokens, 1.25 or 2.5
characters each up to 16,383. Written by `rank.py` and `_async.py`, read by `_replay.py`.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from grpo_run.runtime.files import append_lines

FOLDER = "ledger"
"""In the run directory, with a file for each rank."""
DIGEST_CHARACTERS = 8
AGAIN = "drawn again"
"""Why rows of AsyncGRPO are left out whose prompt was trained in part before the call went on."""
PROMPT = "prompt"
"""Column of TRL's data sets that holds the prompt: text, or a list of messages."""


class Part(NamedTuple):
    """Rows of one prompt that a step has trained, or that were left out until then.

    Attributes:
        lengths: tokens of each.
        reason: why they were left out, "" if they were not.
        attempt: in which that was, if it is known.
    """

    position: int
    prompt: str
    lengths: list[int]
    reason: str
    attempt: int = 0


def ledger_file(run: Path, rank: int) -> Path:
    """Return the path of a rank's file."""
    return run / FOLDER / f"rank{rank}.jsonl"


def prompt_digest(prompt: Any) -> str:
    """Return a short digest of a prompt; what is not JSON, such as an image, counts by its type."""
    text = json.dumps(prompt, skipkeys=True, default=lambda value: type(value).__qualname__)
    return hashlib.blake2b(text.encode(), digest_size=DIGEST_CHARACTERS // 2).hexdigest()


def row_digest(row: Mapping[str, Any]) -> str:
    """Return the digest of a row's prompt; that of a row without a prompt covers all its columns."""
    return prompt_digest(row.get(PROMPT, dict(row)))


def pack(lengths: Iterable[int]) -> str:
    """Return lengths as text: seven bits in each byte, in base 85."""
    packed = bytearray()
    for length in lengths:
        while length > 0x7F:
            packed.append(length & 0x7F | 0x80)
            length >>= 7
        packed.append(length)
    return base64.b85encode(packed).decode()


def unpack(text: str) -> list[int]:
    """Return what `pack` was given.

    Raises:
        ValueError: it is not such a text.
    """
    lengths, length, shift = [], 0, 0
    for byte in base64.b85decode(text):
        length |= (byte & 0x7F) << shift
        shift += 7
        if byte <= 0x7F:
            lengths.append(length)
            length = shift = 0
    if shift:
        raise ValueError("the last length is not complete")
    return lengths


def append(file: Path, *line: Any) -> None:
    """Append one line, by one `write`.

    Raises:
        OSError: it cannot be written.
    """
    append_lines(file, json.dumps(line, separators=(",", ":")).encode() + b"\n")


def read_lines(file: Path) -> Iterator[list[Any]]:
    """Yield the lines of a file; those that a crash has cut are left out.

    Raises:
        OSError: it cannot be read.
    """
    with open(file, "rb") as lines:
        for line in lines:
            try:
                found = json.loads(line)
            except ValueError:
                continue
            if isinstance(found, list) and found and line.endswith(b"\n"):
                yield found
