"""What `grpo-run plan` prints of a prediction. The predictions are written out; none is traced."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from support.predictions import GIB, a_prediction, a_report

from grpo_run.cli.planning.explained import Explained, explained_json, print_explained
from grpo_run.cli.planning.output import print_plan, sentences, verdict
from grpo_run.cli.planning.report import as_json
from grpo_run.runtime.planning.explaining import Explanation, ranked, without_effect
from grpo_run.runtime.planning.prediction import Fit, PredictedPhase

MIB = 1 << 20
ALONE = [
    Explanation(
        name="as-described",
        assumption="the job is as described",
        arithmetic=("0",),
        allocated_bytes=4.0 * GIB,
    ),
    Explanation(name="a", assumption="rows are longer", arithmetic=("1 + 1",), allocated_bytes=20.0 * GIB),
    Explanation(name="b", assumption="no graph is freed", arithmetic=("2 + 2",), allocated_bytes=9.0 * GIB),
]


def _explained(observed: float, alone: Sequence[Explanation] = ALONE, **more: Any) -> Explained:
    return Explained(
        order=ranked(alone, observed),
        observed_bytes=int(observed),
        floor=(
            min(one.allocated_bytes for one in alone),
            ("weights ", min(one.allocated_bytes for one in alone)),
        ),
        **more,
    )


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


def test_an_observation_far_from_every_assumption_is_not_called_explained(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The assumptions are printed all the same, with their arithmetic."""
    print_explained(_explained(100 * GIB))
    text = capsys.readouterr().out
    assert "No single assumption accounts for it" in text
    assert "2 + 2" in text
    assert max(map(len, text.splitlines())) <= 80


def test_an_observation_close_to_an_assumption_names_it_first() -> None:
    """Nearness is that of ratios: 9 is nearer to 10 than 20 is."""
    found = explained_json(_explained(10 * GIB))
    assert [one["name"] for one in found["explanations"]] == ["b", "a", "as-described"]


def test_two_together_are_listed_after_the_single_ones(capsys: pytest.CaptureFixture[str]) -> None:
    """And the text says that they account for it."""
    pair = Explanation(name="a+b", assumption="both", arithmetic=("3 + 3",), allocated_bytes=28.0 * GIB)
    print_explained(_explained(30 * GIB, pairs=[pair]))
    text = capsys.readouterr().out
    assert "two together do" in text
    assert text.index("2 + 2") < text.index("3 + 3")


def test_explanations_of_a_small_job_are_in_the_unit_of_its_plan(capsys: pytest.CaptureFixture[str]) -> None:
    """In GiB every figure would be 0.00."""
    small = [
        replace(one, allocated_bytes=one.allocated_bytes / 1024, arithmetic=("graph ", 1.5 * MIB))
        for one in ALONE
    ]
    print_explained(_explained(9.5 * MIB, small))
    text = capsys.readouterr().out
    assert "Observed: 10.0 MB (9.5 MiB)" in text
    assert "1. 9.0 MiB (0.95 of observed): no graph is freed" in text
    assert "graph 1.5 MiB" in text
    assert "GiB" not in text


def test_what_makes_no_difference_to_the_peak_is_never_the_explanation(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Not even if it is nearer by a byte than the job as it is described."""
    idle = Explanation(
        name="c", assumption="nothing is checkpointed", arithmetic=(), allocated_bytes=4.0 * GIB + 1
    )
    alone = [*ALONE, idle]
    assert without_effect(alone) == [idle]
    print_explained(_explained(4.0 * GIB + 1, ALONE, same=[idle]))
    text = " ".join(capsys.readouterr().out.split())
    assert "Consistent with it (1.00 of observed): the job is as described" in text
    assert "the peak of this job is the same with them: nothing is checkpointed" in text


def test_two_figures_that_no_observation_tells_apart_are_said_together(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Half a percent is less than what an observation is off."""
    twin = replace(ALONE[1], name="d", assumption="two models are loaded", allocated_bytes=20.1 * GIB)
    print_explained(_explained(20 * GIB, [*ALONE, twin]))
    text = " ".join(capsys.readouterr().out.split())
    assert "(1.00 of observed): rows are longer. Within 1 % of that" in text
    assert "two models are loaded" in text
