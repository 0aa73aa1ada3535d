"""How far the calls of a rehearsal go, and which servers they may change."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from grpo_run.runtime.errors import ConfigError
from grpo_run.runtime.launch.rehearsal import MOST_STEPS, Rehearsal, Span


@pytest.mark.parametrize("batch_steps", range(1, 9))
def test_a_whole_generation_batch_comes_before_the_fault_and_one_after_it(batch_steps: int) -> None:
    """The fault is in neither of their steps, and not in the first one of its own, where it has several."""
    span = Span.of(batch_steps)
    place = (span.fault_step - 1) % batch_steps
    assert span.rollout_step == span.fault_step - place > batch_steps
    assert place > 0 or batch_steps == 1
    assert span.fault_step - place + 2 * batch_steps - 1 <= span.steps <= MOST_STEPS


@pytest.mark.parametrize("batch_steps", [1, 2, 8, 13, 14, 24, 100])
def test_two_checkpoints_come_before_the_fault_and_three_steps_after_it(batch_steps: int) -> None:
    span = Span.of(batch_steps)
    assert 2 * span.save_every < span.fault_step <= span.steps - 3
    assert span.steps <= MOST_STEPS


@pytest.mark.parametrize(
    ("per_generation", "iterations", "accumulation", "steps", "fault_step"),
    [
        (1, 1, 1, 8, 5), (None, 1, 8, 8, 5), (4, 2, 1, 24, 13), (4, 2, 4, 9, 6), (8, 1, 8, 8, 5),
        (3, 1, 2, 9, 6),
    ],
)  # fmt: skip
def test_steps_follow_from_the_arguments_of_the_trainer(
    per_generation: int | None, iterations: int, accumulation: int, steps: int, fault_step: int
) -> None:
    args = SimpleNamespace(
        steps_per_generation=per_generation, num_iterations=iterations,
        gradient_accumulation_steps=accumulation,
    )  # fmt: skip
    span = Rehearsal(folder=Path("a"), facts=Path("b")).span(args)
    assert (span.steps, span.fault_step) == (steps, fault_step)


def test_a_given_number_of_steps_counts(tmp_path: Path) -> None:
    span = Rehearsal(folder=tmp_path, facts=tmp_path, steps=30).span()
    assert (span.steps, span.save_every) == (30, 2)


def test_only_a_server_that_is_free_may_be_changed(tmp_path: Path) -> None:
    """Another one is refused, and noted for the rehearsal."""
    told = Rehearsal(folder=tmp_path, facts=tmp_path / "facts", free_server="http://here:1/")
    told.check_server("http://here:1")
    assert not (tmp_path / "facts").exists()
    with pytest.raises(ConfigError, match="http://there:2"):
        told.check_server("http://there:2")
    assert (tmp_path / "facts" / "foreign-server.json").read_text() == '"http://there:2"'


def test_something_is_done_once_in_a_run(tmp_path: Path) -> None:
    told = Rehearsal(folder=tmp_path, facts=tmp_path)
    assert [told.first("hung"), told.first("hung"), told.first("other")] == [True, False, True]
