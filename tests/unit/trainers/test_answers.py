"""The final answer after `####`: found if there is exactly one number, and only then."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_run.trainers.rewards import final_answer


@pytest.mark.parametrize(
    ("line", "number"),
    [
        ("#### 72", "72"), ("####72", "72"), ("#### 72.", "72"), ("#### 72.00", "72"), ("#### $72", "72"),
        ("#### 1,234", "1234"), ("#### 1,234,567.50.", "1234567.5"), ("#### -5", "-5"), ("#### - 5", "-5"),
        ("#### −5", "-5"), ("#### -$5", "-5"), ("#### $-5", "-5"), ("#### .5", "0.5"), ("#### 0.50", "0.5"),
        ("#### **72**", "72"), ("#### `72`", "72"), ("#### 72 apples", "72"), ("#### 50%", "50"),
        ("#### £20", "20"), ("####\n72", "72"), ("#### 72\nThat was easy, 2 steps.", "72"),
        ("#### 1\nNo, wait.\n#### 2", "2"), ("#### 1 #### 2", "2"), ("##### 7", "7"), ("#### item-5", "5"),
        ("#### 007", "7"), ("#### 109,200,000", "109200000"),
    ],
)  # fmt: skip
def test_a_number_is_found_in_every_notation(line: str, number: str) -> None:
    """Currency, thousands separators, decimals, signs, periods, emphasis and units.

    The last marker counts.
    """
    assert final_answer(line) == Decimal(number)


@pytest.mark.parametrize(
    "line",
    [
        "", "72", "### 72", "####", "#### ", "#### seventy-two", "#### 5 + 3 = 8", "#### 3/4", "#### 12,13",
        "#### 1,0000", "#### 1,23", "#### 10-5", "#### 1.2.3", "#### 5 or 6", "#### ５", "#### $",
        "#### 72 ####",
    ],
)  # fmt: skip
def test_a_line_without_exactly_one_number_has_no_answer(line: str) -> None:
    """Listing candidates is not rewarded."""
    assert final_answer(line) is None


@given(st.integers(-(10**18), 10**18), st.booleans(), st.sampled_from(["", "$"]), st.sampled_from(["", "."]))
def test_every_formatted_integer_is_parsed(number: int, commas: bool, sign: str, stop: str) -> None:
    """Of any size, with and without separators, currency and period."""
    written = f"{abs(number):,}" if commas else str(abs(number))
    minus = "-" if number < 0 else ""
    assert final_answer(f"so it is\n#### {minus}{sign}{written}{stop}") == number


@given(st.text(max_size=200))
def test_no_text_raises(text: str) -> None:
    """A model may generate anything, and a reward function that raises would end the run."""
    final_answer("####" + text)


def test_a_very_long_number_is_parsed_exactly() -> None:
    """Longer than Python's limit for converting integers."""
    assert final_answer("#### " + "9" * 5000) == Decimal("9" * 5000)
