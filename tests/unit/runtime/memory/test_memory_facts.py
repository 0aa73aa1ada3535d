"""The facts of a call that decide how it could use less memory: the file, and what follows from its sizes."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from grpo_run.runtime.history.run_directory import RunDirectory
from grpo_run.runtime.memory.facts import MemoryFacts
from grpo_run.runtime.memory.files import FILE_NAME, read_facts, write_facts

SFT = MemoryFacts(
    trainer_class="SFTTrainer", trainer="sft", world_size=2, layout="ddp",
    per_device_train_batch_size=4, gradient_accumulation_steps=2, samples=64,
)  # fmt: skip


def test_the_facts_survive_their_file_which_only_the_user_can_read(tmp_path: Path) -> None:
    write_facts(tmp_path, SFT)
    assert read_facts(tmp_path) == SFT
    assert stat.S_IMODE((tmp_path / FILE_NAME).stat().st_mode) == 0o600


def test_without_a_file_or_with_one_that_is_not_valid_there_are_no_facts(tmp_path: Path) -> None:
    assert read_facts(tmp_path) is None
    for text in ("", "[]", '{"world_size": 0}', "{" * 100_000):
        (tmp_path / FILE_NAME).write_text(text)
        assert read_facts(tmp_path) is None


def test_facts_of_a_newer_release_are_read(tmp_path: Path) -> None:
    write_facts(tmp_path, SFT)
    path = tmp_path / FILE_NAME
    path.write_text(path.read_text().replace("{", '{"later": 1,', 1))
    assert read_facts(tmp_path) == SFT


def test_the_file_belongs_to_the_run(tmp_path: Path) -> None:
    write_facts(tmp_path, SFT)
    assert RunDirectory(path=tmp_path).own_files() == [tmp_path / FILE_NAME]


@pytest.mark.parametrize(("divisor", "rows"), [(1, 4), (2, 2), (8, 1), (3, 4)])
def test_a_plan_divides_the_micro_batch_as_far_as_its_size_allows(divisor: int, rows: int) -> None:
    assert SFT.per_device_train_batch_size // SFT.divisor(divisor) == rows


@pytest.mark.parametrize(
    ("changed", "ragged"),
    [
        ({}, False),
        ({"samples": 65}, True),
        ({"samples": None}, True),
        ({"samples": 65, "world_size": 1}, False),
        ({"samples": 65, "world_size": 1, "drop_last": True}, True),
        ({"samples": None, "world_size": 1}, True),
        ({"samples": 65, "generates": "transformers"}, False),
    ],
)
def test_a_batch_is_ragged_if_the_samples_do_not_fill_it_and_it_is_filled_up_or_dropped(
    changed: dict[str, object], ragged: bool
) -> None:
    assert SFT.model_copy(update=changed).has_ragged_batch is ragged
