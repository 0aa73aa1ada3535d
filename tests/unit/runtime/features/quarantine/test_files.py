"""Files of quarantined prompts are checked whenever they are read."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_run.runtime.errors import RunDirectoryError
from grpo_run.runtime.features.quarantine._files import (
    RecordedRollout,
    read_quarantine,
    read_rollout,
    write_quarantine,
    write_rollout,
)
from grpo_run.runtime.features.quarantine.events import PromptDigest, QuarantinedPrompt, RolloutPosition

DIGEST = "0" * 64
PROMPT = QuarantinedPrompt(sha256=DIGEST, preview="2 + 2", train_call=1, from_step=4)
POSITION = RolloutPosition(train_call=1, step=4)


def test_the_file_is_private_and_read_back(tmp_path: Path) -> None:
    """Prompts may be private."""
    path = tmp_path / "quarantine.json"
    assert read_quarantine(path) is None
    write_quarantine(path, [PROMPT])
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_quarantine(path) == [PROMPT]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "Invalid JSON"),
        ("{}", "the file: Input should be a valid"),
        ('[{"sha256": "abc", "train_call": 1, "from_step": 4}]', "0.sha256: String should match"),
        (
            f'[{{"sha256": "{DIGEST}", "train_call": 1, "from_step": 0}}]',
            "0.from_step: Input should be greater",
        ),
        (f'[{{"sha256": "{DIGEST}", "train_call": 1}}]', "0.from_step: Field required"),
    ],
)
def test_an_edited_file_that_is_wrong_is_refused_with_the_place(tmp_path: Path, text: str, says: str) -> None:
    """In one line that says what to do."""
    path = tmp_path / "quarantine.json"
    path.write_text(text)
    with pytest.raises(RunDirectoryError) as refused:
        read_quarantine(path)
    assert says in str(refused.value)
    assert "delete the file" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_an_empty_list_means_that_nothing_is_replaced(tmp_path: Path) -> None:
    """The user has taken every prompt out."""
    path = tmp_path / "quarantine.json"
    path.write_text("[]")
    assert read_quarantine(path) == []


def test_a_recorded_rollout_counts_at_its_position_only(tmp_path: Path) -> None:
    """A file that is missing, truncated or of another step says nothing."""
    path = tmp_path / "rank0.prompts.json"
    assert read_rollout(path, POSITION) == ()
    prompts = (PromptDigest(sha256=DIGEST, preview="2 + 2"),) * 2
    write_rollout(path, RecordedRollout(position=POSITION, prompts=prompts))
    assert read_rollout(path, POSITION) == prompts
    assert read_rollout(path, RolloutPosition(train_call=1, step=5)) == ()
    path.write_text(path.read_text()[:40])
    assert read_rollout(path, POSITION) == ()
