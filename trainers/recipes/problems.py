"""GSM8K's problems, read from JSON lines and checked one by one.

Called by the recipe loader, to refuse bad data before anything starts, and by the gsm8k task. Imports nothing
heavy. Does not download; `gsm8k.py` does that when no path is given.
"""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

from grpo_run.runtime.errors import ConfigError
from grpo_run.trainers.recipes.answers import final_answer

TRAIN_FILE = "train.jsonl"
MAX_LINE_BYTES = 1 << 20


class Problem(NamedTuple):
    """A question, the number that answers it, and the reference solution that ends in `#### number`."""

    question: str
    answer: Decimal
    solution: str


def read_problems(path_or_directory: str) -> list[Problem]:
    """Read a JSON-lines file, or `train.jsonl` in a directory. Blank lines are passed over.

    Raises:
        ConfigError: there is no such file, it holds no problem, or a line is not `{"question", "answer"}` with
            a `#### number` at the answer's end; names file and line.
    """
    path = Path(path_or_directory).expanduser()
    if path.is_dir():
        path = path / TRAIN_FILE
    problems = []
    try:
        with open(path, "rb") as file:
            number = 0
            while line := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                if len(line) > MAX_LINE_BYTES:
                    raise ConfigError(f"{path}:{number}: line longer than {MAX_LINE_BYTES} bytes")
                if line.strip():
                    problems.append(_problem_of(line, f"{path}:{number}"))
    except OSError as error:
        raise ConfigError(f"cannot read data {str(path)!r}: {error.strerror or error}") from None
    if not problems:
        raise ConfigError(f"{path}: holds no problems")
    return problems


def _problem_of(line: bytes, origin: str) -> Problem:
    try:
        record: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{origin}: not JSON: {error}") from None
    if not isinstance(record, dict):
        raise ConfigError(f"{origin}: expected an object with 'question' and 'answer'")
    return checked_problem(record, origin)


def checked_problem(record: dict[str, Any], origin: str) -> Problem:
    """One record as a problem; `origin` (`file:line`) begins the message of the ConfigError if it is none."""
    for key in ("question", "answer"):
        if not isinstance(record.get(key), str) or not record[key].strip():
            raise ConfigError(f"{origin}: {key!r} is missing or is not text")
    answer = final_answer(record["answer"])
    if answer is None:
        raise ConfigError(f"{origin}: the answer does not end in '#### number'")
    return Problem(question=record["question"], answer=answer, solution=record["answer"])
