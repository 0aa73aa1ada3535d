"""Reading GSM8K: every problem of the real files is read, and an invalid line is located."""

from __future__ import annotations

import json
import os
from decimal import Decimal
from pathlib import Path

import pytest

from grpo_run.runtime.errors import ConfigError
from grpo_run.trainers.recipes.problems import checked_problem, read_problems
from grpo_run.trainers.rewards import answer_format, correct_answer

# read at import: a fixture clears these variables before each test
REAL = Path(os.environ.get("GRPO_RUN_GSM8K") or Path(__file__).parents[5] / "shared/data/gsm8k")
real_files = pytest.mark.skipif(
    not (REAL / "train.jsonl").is_file(), reason="GSM8K was not found; set GRPO_RUN_GSM8K to its directory"
)

GOOD = {"question": "What is 1+1?", "answer": "1+1=<<1+1=2>>2\n#### 2"}


def error(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        read_problems(str(path))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@real_files
def test_all_of_gsm8k_is_read() -> None:
    """Each of the 8,792 reference answers is a number."""
    problems = [
        problem for name in ("train", "test") for problem in read_problems(str(REAL / f"{name}.jsonl"))
    ]
    assert len(problems) == 8792
    assert problems[0].answer == 72


@real_files
def test_a_directory_means_its_training_file() -> None:
    """`data=DIRECTORY` reads its train.jsonl."""
    assert len(read_problems(str(REAL))) == 7473


@real_files
def test_reference_solutions_get_full_rewards() -> None:
    """Each reference solution is correct and has the required format."""
    problems = read_problems(str(REAL / "train.jsonl")) + read_problems(str(REAL / "test.jsonl"))
    solutions = [problem.solution for problem in problems]
    assert set(correct_answer(solutions, answer=[str(problem.answer) for problem in problems])) == {1.0}
    assert set(answer_format(solutions)) == {1.0}


@real_files
def test_solutions_of_other_problems_get_no_reward() -> None:
    """Problems with equal answers are excepted."""
    problems = read_problems(str(REAL / "test.jsonl"))
    answers = [problem.answer for problem in problems]
    shifted = answers[1:] + answers[:1]
    scores = correct_answer(
        [problem.solution for problem in problems], answer=[str(number) for number in shifted]
    )
    assert scores == [float(one == other) for one, other in zip(answers, shifted, strict=True)]


def test_blank_lines_and_a_missing_final_newline_are_accepted(tmp_path: Path) -> None:
    """Windows line endings are accepted too."""
    path = tmp_path / "mine.jsonl"
    path.write_bytes(b"\r\n" + json.dumps(GOOD).encode() + b"\r\n\n" + json.dumps(GOOD).encode())
    assert [problem.answer for problem in read_problems(str(path))] == [Decimal(2), Decimal(2)]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"question": ', "invalid JSON"),
        (b"\xff\xfe", "invalid JSON"),
        (b"[" * 100_000, "invalid JSON"),
        (b'["question"]', "expected an object"),
        (b"3", "expected an object"),
        (b'{"question": "1+1?"}', "'answer' is missing or is not text"),
        (b'{"question": 3, "answer": "#### 2"}', "'question' is missing or is not text"),
        (b'{"question": " ", "answer": "#### 2"}', "'question' is missing or is not text"),
        (b'{"question": "1+1?", "answer": "2"}', "does not end in '#### number'"),
        (b'{"question": "1+1?", "answer": "#### two"}', "does not end in '#### number'"),
    ],
)
def test_an_invalid_line_is_located(tmp_path: Path, line: bytes, words: str) -> None:
    """The error names file, line and problem."""
    path = tmp_path / "mine.jsonl"
    path.write_bytes(json.dumps(GOOD).encode() + b"\n\n" + line + b"\n")
    message = error(path)
    assert message.startswith(f"{path}:3: ")
    assert words in message


def test_missing_and_empty_files_are_errors(tmp_path: Path) -> None:
    """A missing file, a directory without one, and a file without problems."""
    assert "No such file" in error(tmp_path / "none.jsonl")
    assert str(tmp_path / "train.jsonl") in error(tmp_path)
    (tmp_path / "train.jsonl").write_text("\n\n", encoding="utf-8")
    assert "contains no problems" in error(tmp_path)


def test_a_row_from_the_hub_is_validated_too() -> None:
    """Rows are not lines of a file."""
    assert checked_problem(dict(GOOD), "hub, row 0").answer == 2
    with pytest.raises(ConfigError, match="hub, row 7: 'answer'"):
        checked_problem({"question": "x"}, "hub, row 7")
