"""A choice is serialized for the other ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.resuming import Ask, Save

from grpo_run.runtime.checkpoints.publishing import reject_checkpoint
from grpo_run.runtime.errors import CheckpointError
from grpo_run.runtime.rank.resuming.request import ResumeChoice, ResumeRequest


def test_a_serialized_choice_is_equal_on_another_rank(
    resume_request: ResumeRequest, ask: Ask, save: Save, tmp_path: Path
) -> None:
    """A rank that cannot see the checkpoint raises CheckpointError."""
    save(10, finished=True)
    for choice in (
        ask(resume_request),
        ask(replace(resume_request, run_id="run-9")),
        ResumeChoice(argument=None),
    ):
        assert ResumeChoice.from_text(choice.to_text(), resume_request) == choice
    from_script = ResumeChoice.from_text(
        ResumeChoice(argument="a", from_script=True).to_text(), replace(resume_request, script_argument="b")
    )
    assert from_script.argument == "b"
    text = ask(resume_request).to_text()
    reject_checkpoint(Path(ask(resume_request).argument), "gone")  # type: ignore[arg-type]
    with pytest.raises(CheckpointError):
        ResumeChoice.from_text(text, resume_request)
    with pytest.raises(CheckpointError):
        ResumeChoice.from_text(ResumeChoice(argument=str(tmp_path / "none")).to_text(), resume_request)
