"""GSM8K's files: every problem of the real ones is read, and what is broken is located."""

from __future__ import annotations

import json
import os
from decimal import Decimal
from pathlib import Path

import pytest

from grpo_run.runtime.errors import ConfigError
from grpo_run.trainers.recipes.problems import checked_problem, read_problems
from grpo_run.trainers.recipes.rewards import answer_format, correct_answer

# read now: a fixture clears these variables before any test runs
REAL = Path(os.environ.get("GRPO_RUN_GSM8K") or Path(__file__).parents[5] / "shared/data/gsm8k")
real_files = pytest.mark.skipif(
    not (REAL / "train.jsonl").is_file(), reason="GSM8K is not here; set GRPO_RUN_GSM8K to its directory"
)

GOOD = {"question": "What is 1+1?", "answer": "1+1=<<1+1=2>>2\n#### 2"}


def _refused(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        read_problems(str(path))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@real_files
def test_all_of_gsm8k_is_read() -> None:
    """Every one of the 8,792 reference answers is a number."""
    problems = [
        problem for name in ("train", "test") for problem in read_problems(str(REAL / f"{name}.jsonl"))
    ]
    assert len(problems) == 8792
    assert problems[0].answer == 72


@real_files
def test_a_directory_stands_for_its_training_file() -> None:
    """`data=DIRECTORY` reads train.jsonl in it."""
    assert len(read_problems(str(REAL))) == 7473


@real_files
def test_reference_solutions_get_all_rewards() -> None:
    """Each reference solution is right by its own answer and in the form that prompts ask for."""
    problems = read_problems(str(REAL / "train.jsonl")) + read_problems(str(REAL / "test.jsonl"))
    solutions = [problem.solution for problem in problems]
    assert set(correct_answer(solutions, answer=[str(problem.answer) for problem in problems])) == {1.0}
    assert set(answer_format(solutions)) == {1.0}


@real_files
def test_other_problems_solutions_get_no_reward_for_correctness() -> None:
    """A right answer to the question before is a wrong one, unless the numbers happen to be equal."""
    problems = read_problems(str(REAL / "test.jsonl"))
    answers = [problem.answer for problem in problems]
    shifted = answers[1:] + answers[:1]
    scores = correct_answer(
        [problem.solution for problem in problems], answer=[str(number) for number in shifted]
    )
    assert scores == [float(one == other) for one, other in zip(answers, shifted, strict=True)]


def test_blank_lines_and_a_last_line_without_end_are_read(tmp_path: Path) -> None:
    """As editors leave them, Windows line ends included."""
    path = tmp_path / "mine.jsonl"
    path.write_bytes(b"\r\n" + json.dumps(GOOD).encode() + b"\r\n\n" + json.dumps(GOOD).encode())
    assert [problem.answer for problem in read_problems(str(path))] == [Decimal(2), Decimal(2)]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"question": ', "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'["question"]', "expected an object"),
        (b"3", "expected an object"),
        (b'{"question": "1+1?"}', "'answer' is missing or is not text"),
        (b'{"question": 3, "answer": "#### 2"}', "'question' is missing or is not text"),
        (b'{"question": " ", "answer": "#### 2"}', "'question' is missing or is not text"),
        (b'{"question": "1+1?", "answer": "2"}', "does not end in '#### number'"),
        (b'{"question": "1+1?", "answer": "#### two"}', "does not end in '#### number'"),
        (b'{"question": "' + b"x" * (1 << 20) + b'", "answer": "#### 2"}', "line longer than"),
    ],
)
def test_a_broken_line_is_located(tmp_path: Path, line: bytes, words: str) -> None:
    """File, line and problem; the good line before it does not hide it."""
    path = tmp_path / "mine.jsonl"
    path.write_bytes(json.dumps(GOOD).encode() + b"\n\n" + line + b"\n")
    message = _refused(path)
    assert message.startswith(f"{path}:3: ")
    assert words in message


def test_absent_and_empty_files_are_refused(tmp_path: Path) -> None:
    """No file, a directory without one, a file without problems."""
    assert "No such file" in _refused(tmp_path / "none.jsonl")
    assert str(tmp_path / "train.jsonl") in _refused(tmp_path)
    (tmp_path / "train.jsonl").write_text("\n\n", encoding="utf-8")
    assert "holds no problems" in _refused(tmp_path)


def test_a_row_of_the_hub_is_held_to_the_same() -> None:
    """Rows that were never lines of a file are checked too."""
    assert checked_problem(dict(GOOD), "hub, row 0").answer == 2
    with pytest.raises(ConfigError, match="hub, row 7: 'answer'"):
        checked_problem({"question": "x"}, "hub, row 7")
