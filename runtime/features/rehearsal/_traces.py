"""What a rank of a rehearsal notes: data, rewards and weights, as digests in one file of JSON lines.

Two undisturbed runs of a repeatable job write equal lines, so the first line that differs names what is not
repeatable. Changes nothing.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch


class Traces:
    """The notes of one rank.

    Args:
        folder: of the traces of the run.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = folder / f"rank{rank}.jsonl"

    def write(self, call: int, step: int, what: str, given: str, got: Any = None) -> None:
        """Write one line.

        Args:
            what: `weights`, `prompts`, `batch`, or `reward` with the name of the function.
            given: digest of what it got.
            got: what it returned.
        """
        line = {"call": call, "step": step, "what": what, "given": given, "got": got}
        with open(self._file, "a") as file:
            file.write(f"{json.dumps(line)}\n")


def digest_of_values(value: Any) -> str:
    """Return a digest of plain values and tensors; anything else counts as its type."""

    def plain(other: Any) -> Any:
        return other.tolist() if isinstance(other, torch.Tensor) else type(other).__name__

    text = json.dumps(value, default=plain, sort_keys=True, skipkeys=True)
    return hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()
