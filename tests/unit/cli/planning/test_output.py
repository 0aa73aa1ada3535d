"""What `grpo-run plan` prints of a prediction. The predictions are written out; none is traced."""

from __future__ import annotations

import json

import pytest
from support.predictions import GIB, a_prediction, a_report

from grpo_run.cli.planning.as_json import as_json
from grpo_run.cli.planning.explained import explained_json, print_explained
from grpo_run.cli.planning.output import print_plan, sentences
from grpo_run.trainers.planning.explaining.assumptions import Explanation, ranked

ORDER = ranked(
    [
        Explanation(name="a", assumption="rows are longer", arithmetic="1 + 1", allocated_bytes=20.0 * GIB),
        Explanation(name="b", assumption="no graph is freed", arithmetic="2 + 2", allocated_bytes=9.0 * GIB),
    ],
    10.0 * GIB,
)


def test_a_plan_fits_80_columns_and_says_what_was_never_compared(capsys: pytest.CaptureFixture[str]) -> None:
    """The binding phase is marked in the ledger."""
    print_plan(a_report())
    text = capsys.readouterr().out
    assert "backward*" in text
    assert "It fits into 16.00 GiB" in text
    assert "never been compared" in text
    assert "gradient_checkpointing=True" in text
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize(
    ("gpu", "expected"), [(9, "It fits into"), (8.1, "It may not fit into"), (7, "It does not fit into")]
)
def test_a_range_that_contains_the_size_of_the_gpu_is_no_promise(gpu: float, expected: str) -> None:
    """8 to 8.25 GiB are needed."""
    assert any(one.startswith(expected) for one in sentences(a_report(gpu_bytes=int(gpu * GIB))))


def test_a_disagreement_with_the_closed_form_is_said() -> None:
    """A factor of 1.5, either way."""
    close, far = ({**a_prediction().closed_form, "backward": size * GIB} for size in (7.0, 2.0))
    assert not any(
        "disagree" in one for one in sentences(a_report(prediction=a_prediction(closed_form=close)))
    )
    assert any("disagree" in one for one in sentences(a_report(prediction=a_prediction(closed_form=far))))


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
    print_explained(ORDER, 100 * GIB, (4.0 * GIB, "weights 4 GiB"), [])
    text = capsys.readouterr().out
    assert "No single assumption accounts for it" in text
    assert "2 + 2" in text
    assert max(map(len, text.splitlines())) <= 80


def test_an_observation_close_to_an_assumption_names_it_first() -> None:
    """Nearness is that of ratios: 9 is nearer to 10 than 20 is."""
    found = explained_json(ORDER, 10 * GIB, (4.0 * GIB, "weights 4 GiB"), [])
    assert [one["name"] for one in found["explanations"]] == ["b", "a"]


def test_two_together_are_listed_after_the_single_ones(capsys: pytest.CaptureFixture[str]) -> None:
    """And the text says that they account for it."""
    pair = Explanation(name="a+b", assumption="both", arithmetic="3 + 3", allocated_bytes=28.0 * GIB)
    print_explained(ORDER, 30 * GIB, (4.0 * GIB, "weights 4 GiB"), [pair])
    text = capsys.readouterr().out
    assert "two together do" in text
    assert text.index("2 + 2") < text.index("3 + 3")
