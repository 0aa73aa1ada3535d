"""A checkpoint of another world size, batch or model is resumed or refused with a reason."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.resuming import Ask, Rejected, Save

from grpo_run.runtime.checkpoints.compatibility import BatchGeometry, digest_model_shape
from grpo_run.runtime.errors import UsageError
from grpo_run.runtime.rank.resuming.request import ResumeRequest

BATCH = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 1,
    "global_batch": 8,
    "layout": "ddp",
}
ONE = {"world_size": 1, "batch": BatchGeometry(ranks=1, per_device=8, accumulation=1)}


def test_fewer_ranks_resume_with_the_same_batch(resume_request: ResumeRequest, ask: Ask, save: Save) -> None:
    """The notice says what changes."""
    path = save(10, **BATCH)
    choice = ask(replace(resume_request, **ONE))
    assert choice.argument == str(path)
    assert "random numbers" in (choice.notice or "")


def test_another_batch_is_refused_with_the_settings_that_fit(
    resume_request: ResumeRequest, ask: Ask, save: Save
) -> None:
    """The run neither loads the checkpoint nor starts from step 0."""
    save(10, **BATCH)
    smaller = replace(
        resume_request, world_size=1, batch=BatchGeometry(ranks=1, per_device=4, accumulation=1)
    )
    with pytest.raises(
        UsageError, match="set per_device_train_batch_size=8 or gradient_accumulation_steps=2"
    ):
        ask(smaller)
    save(20)
    with pytest.raises(UsageError, match="batch it was written with is unknown: start 2 ranks"):
        ask(smaller)


def test_sharded_state_is_refused_at_another_world_size(
    resume_request: ResumeRequest, ask: Ask, save: Save
) -> None:
    """The message gives the number of ranks that fits."""
    save(10, **(BATCH | {"layout": "deepspeed-zero3"}))
    with pytest.raises(UsageError, match=r"deepspeed-zero3 .* start 2 ranks"):
        ask(replace(resume_request, **ONE))


def test_a_checkpoint_inside_a_rollout_is_rejected_for_an_older_boundary(
    resume_request: ResumeRequest, ask: Ask, save: Save, rejected: Rejected
) -> None:
    """The rejection is reported; without an older one, the error gives the number of ranks that fits."""
    boundary = save(5, **BATCH)
    save(10, **BATCH)

    def resharding_problem(folder: Path, ranks: int) -> str | None:
        return "it is inside a rollout of 2 ranks" if folder.name == "checkpoint-10" else None

    choice = ask(replace(resume_request, **ONE), resharding_problem)
    assert choice.argument == str(boundary)
    assert rejected == [("checkpoint-10", "it is inside a rollout of 2 ranks")]
    with pytest.raises(UsageError, match="inside a rollout; start 2 ranks"):
        ask(replace(resume_request, **ONE), lambda folder, ranks: "it is inside a rollout")


SHAPES = (("weight", (4, 2), "float32"),)


def test_another_model_is_refused_before_loading(resume_request: ResumeRequest, ask: Ask, save: Save) -> None:
    """The message names the parameter that differs; the same model is accepted."""
    path = save(10, model_shape=digest_model_shape(SHAPES))
    assert ask(replace(resume_request, parameters=SHAPES)).argument == str(path)
    other = (("weight", (4, 3), "float32"),)
    for changes in (
        {},
        {"run_id": "run-9", "resume_from": "run-1"},
        {"run_id": "run-9", "resume_from": str(path)},
    ):
        with pytest.raises(
            UsageError, match=r"weight has shape \[4, 2\] in the checkpoint and \[4, 3\] in the model"
        ):
            ask(replace(resume_request, parameters=other, **changes))
