"""GSM8K's problems from JSON lines, validated.

The recipe loader calls it to reject invalid data before any process starts; `gsm8k.py` reads problems with
it. Imports no training library. Does not download (`gsm8k.py` does if the recipe sets no path) and does not
score (`trainers/rewards.py`).
"""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

from grpo_run.runtime.errors import ConfigError
from grpo_run.trainers.rewards import final_answer


class Problem(NamedTuple):
    """A question, its answer, and the reference solution, which ends in `#### number`."""

    question: str
    answer: Decimal
    solution: str


def read_problems(path_or_directory: str, split: str = "train") -> list[Problem]:
    """Read a JSON-lines file, or the one of a split in a directory. Blank lines are skipped.

    Args:
        path_or_directory: of `train.jsonl`; that of another split is beside it.
        split: `train` or `test`.

    Raises:
        ConfigError: the file cannot be read, contains no problem, or has a line that is not an object with a
            question and an answer that ends in `#### number`. The message names file and line.
    """
    path = Path(path_or_directory).expanduser()
    if path.is_dir():
        path = path / f"{split}.jsonl"
    elif split != "train":
        path = path.with_name(f"{split}.jsonl")
    try:
        with open(path, "rb") as file:
            problems = [
                _problem_of(line, f"{path}:{number}")
                for number, line in enumerate(file, start=1)
                if line.strip()
            ]
    except OSError as error:
        raise ConfigError(f"cannot read the data file {str(path)!r}: {error.strerror or error}") from None
    if not problems:
        raise ConfigError(f"{path}: the file contains no problems")
    return problems


def _problem_of(line: bytes, origin: str) -> Problem:
    try:
        record: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{origin}: invalid JSON: {error}") from None
    if not isinstance(record, dict):
        raise ConfigError(f"{origin}: expected an object with 'question' and 'answer'")
    return checked_problem(record, origin)


def checked_problem(record: dict[str, Any], origin: str) -> Problem:
    """Validate one record.

    Args:
        origin: where the record comes from (`file:line`), for the error message.

    Raises:
        ConfigError: the record is not a problem.
    """
    for key in ("question", "answer"):
        if not isinstance(record.get(key), str) or not record[key].strip():
            raise ConfigError(f"{origin}: {key!r} is missing or is not text")
    answer = final_answer(record["answer"])
    if answer is None:
        raise ConfigError(f"{origin}: the answer does not end in '#### number'")
    return Problem(question=record["question"], answer=answer, solution=record["answer"])
