"""What `grpo-run plan` prints of a prediction. The predictions are written out; none is traced."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from support.predictions import GIB, a_prediction, a_report

from grpo_run.cli.planning.output import print_plan, sentences, verdict
from grpo_run.cli.planning.report import as_json
from grpo_run.runtime.planning.prediction import Fit, PredictedPhase

MIB = 1 << 20


def test_a_plan_fits_80_columns_and_says_what_was_never_compared(capsys: pytest.CaptureFixture[str]) -> None:
    """The binding phase is marked in the ledger."""
    print_plan(a_report())
    text = capsys.readouterr().out
    assert "backward*" in text
    assert text.startswith("Fits into 16.00 GiB")
    assert "never been compared" in text
    assert "gradient_checkpointing=True" in text
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize(
    ("gpu", "expected"),
    [(9, "Fits into 9.00 GiB"), (8.1, "May not fit into 8.10 GiB"), (7, "Does not fit into 7.00 GiB")],
)
def test_a_range_that_contains_the_size_of_the_gpu_is_no_promise(gpu: float, expected: str) -> None:
    """8 to 8.25 GiB are needed."""
    assert verdict(a_report(gpu_bytes=int(gpu * GIB))).startswith(expected)


def test_what_a_fit_does_not_depend_on_is_left_out() -> None:
    """The terms that are 0 when they are rounded."""

    def said(**terms: float) -> str:
        fits = {
            ("backward", 0): Fit(fixed_bytes=5.0 * GIB, **{"token_bytes": 0.0, "pair_bytes": 0.0, **terms})
        }
        (found,) = (
            one for one in sentences(a_report(prediction=a_prediction(fits=fits))) if one.startswith("Near")
        )
        return found

    assert "is 5.00 GiB, of which nothing depends on the micro-batch" in said()
    assert "is 5.00 GiB + 2.0 KiB per token of the micro-batch;" in said(token_bytes=2048.0)
    assert "is 5.00 GiB + 3.00 B per row and squared length;" in said(pair_bytes=3.0)


def test_a_length_that_the_model_limits_is_not_said_to_be_limited_by_memory() -> None:
    """The context of the shape has 32,768 tokens, of which prompts take 256."""
    limited = list(sentences(a_report(largest_completion=32_768 - 256)))
    assert any("32512 tokens, where the model's context of 32768 ends" in one for one in limited)
    assert "Longest completion at this micro-batch: 2048 tokens." in list(sentences(a_report()))


def test_a_small_job_is_printed_in_mib(capsys: pytest.CaptureFixture[str]) -> None:
    """In GiB all its figures would be 0.00."""
    held = {"weights": 3.0 * MIB, "activations": 1.5 * MIB}
    memory = PredictedPhase(traced=held, allocated_bytes=4.5 * MIB, low_bytes=4.5 * MIB, high_bytes=4.5 * MIB)
    print_plan(a_report(prediction=a_prediction(phases={"backward": memory}, terms=[])))
    text = capsys.readouterr().out
    assert "Peak of each phase on one rank, MiB" in text
    assert re.search(r"backward\* +3\.0 +1\.5 +0\.0 +4\.5 +4\.5", text)


@pytest.mark.parametrize(("trained", "expected"), [(6_144, "6,144"), (1_081_344, "1.1 M")])
def test_a_small_adapter_is_not_said_to_train_nothing(
    capsys: pytest.CaptureFixture[str], trained: int, expected: str
) -> None:
    """Rounded to a million it would be 0.0 M."""
    adapted = replace(a_prediction().job, lora_rank=8)
    print_plan(a_report(prediction=a_prediction(job=adapted, trained_parameters=trained)))
    assert f"LoRA of rank 8 ({expected} trained)" in " ".join(capsys.readouterr().out.split())


def test_rows_of_sft_have_one_length_and_no_completion(capsys: pytest.CaptureFixture[str]) -> None:
    """The header and the longest row."""
    sft = replace(a_prediction().job, algorithm="sft", prompt=0, completion=1024)
    print_plan(a_report(prediction=a_prediction(job=sft)))
    text = " ".join(capsys.readouterr().out.split())
    assert "SFT; micro-batch of 8 rows of 1024 tokens" in text
    assert "Longest row at this micro-batch" in text


def test_a_plan_as_json_has_the_verdict_the_phases_and_the_changes() -> None:
    """It can be written as JSON, and all its sizes are whole bytes."""
    found = json.loads(json.dumps(as_json(a_report())))
    assert found["fits"] is True
    assert found["binding_phase"] == "backward"
    assert found["phases"]["backward"]["kinds"]["logits"] == 0.75 * GIB
    assert found["changes"][0]["saved_bytes"] == 2.5 * GIB
