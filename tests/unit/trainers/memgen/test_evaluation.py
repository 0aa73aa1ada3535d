"""The evaluation answers each batch once, also if it is started again, and counts where memory was woven."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from grpo_run.runtime.errors import ConfigError
from grpo_run.trainers.memgen import evaluation
from grpo_run.trainers.memgen.evaluation import Outcome, accuracy, evaluate
from grpo_run.trainers.memgen.generation import Completions, GenerationSettings
from grpo_run.trainers.memgen.model import NO_DECISION, SKIP, WEAVE, MemGen

DELIMITER, OTHER = 5, 6
SETTINGS = GenerationSettings(max_tokens=4, end_tokens=[1], pad_token=0)


class Delimiters:
    """All that the evaluation reads of a MemGen."""

    delimiters = (DELIMITER, OTHER)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[int]]]:
    """Replace generation: a completion is [7, delimiter, other, 1]; return mode and prompts of each call."""
    calls: list[tuple[str, list[int]]] = []

    def generate(memgen: Any, prompts: Sequence[Sequence[int]], settings: Any, mode: str) -> Completions:
        calls.append((mode, [prompt[0] for prompt in prompts]))
        woven = NO_DECISION if mode == "none" else WEAVE
        other = SKIP if mode == "argmax" else woven
        return Completions(
            tokens=[[7, DELIMITER, OTHER, 1] for _ in prompts],
            decisions=[[woven, NO_DECISION, woven, other] for _ in prompts],
        )

    monkeypatch.setattr(evaluation, "generate", generate)
    return calls


def run(file: Path, *, problems: int = 5) -> dict[str, list[Outcome]]:
    prompts = [[number] for number in range(problems)]
    return evaluate(
        cast(MemGen, Delimiters()), prompts, lambda number, tokens: float(number % 2 == 0),
        SETTINGS, batch_size=2, file=file,
    )  # fmt: skip


def test_each_variant_answers_every_problem(tmp_path: Path, asked: list[tuple[str, list[int]]]) -> None:
    """In batches, by its own mode; scores stay with their problems."""
    found = run(tmp_path / "evaluation.jsonl")
    assert asked == [(mode, rows) for mode in ("none", "always", "argmax") for rows in ([0, 1], [2, 3], [4])]
    for outcomes in found.values():
        assert [outcome.score for outcome in outcomes] == [1.0, 0.0, 1.0, 0.0, 1.0]
        assert accuracy(outcomes) == pytest.approx(0.6)
    assert [outcomes[0].prompt for outcomes in found.values()] == [False, True, True]
    assert evaluation.firing_by_position(found["baseline"]) == [0.0, 0.0]
    assert evaluation.firing_by_position(found["trained"]) == [1.0, 0.0]
    assert evaluation.firing_by_delimiter(found["trained"]) == {DELIMITER: 1.0, OTHER: 0.0}
    assert evaluation.firing_by_delimiter(found["inactive"]) == {DELIMITER: 1.0, OTHER: 1.0}


@pytest.mark.parametrize("kept", range(11))
def test_an_evaluation_goes_on_after_its_last_whole_line(
    tmp_path: Path, asked: list[tuple[str, list[int]]], kept: int
) -> None:
    """After a kill at any line, and in the middle of one; the file and the outcomes are as without it."""
    file = tmp_path / "evaluation.jsonl"
    expected, text = run(file), file.read_text()
    lines = text.splitlines(keepends=True)
    assert len(lines) == 10
    torn = lines[kept][: len(lines[kept]) // 2] if kept < len(lines) else ""
    file.write_text("".join(lines[:kept]) + torn)
    asked.clear()
    assert run(file) == expected
    assert file.read_text() == text
    assert len(asked) == 10 - max(1, kept)


def test_results_of_other_settings_are_not_continued(
    tmp_path: Path, asked: list[tuple[str, list[int]]]
) -> None:
    """The error names the file, which stays as it is."""
    file = tmp_path / "evaluation.jsonl"
    run(file)
    before = file.read_bytes()
    with pytest.raises(ConfigError, match="results of other settings"):
        run(file, problems=6)
    assert file.read_bytes() == before
    assert json.loads(before.splitlines()[0])["temperature"] == 0
