"""Which rows of a rollout are replaced, and by which."""

from __future__ import annotations

import hypothesis
import pytest
from hypothesis import strategies

from grpo_run.runtime.features.quarantine.events import MAX_PREVIEW_CHARACTERS
from grpo_run.runtime.features.quarantine.rank import prompt_digest, replaced_rows


def rows(text: str) -> list[dict[str, str]]:
    """A row for each letter, which is its prompt."""
    return [{"prompt": letter} for letter in text]


def digests(text: str) -> set[str]:
    """The SHA-256 of the prompts of each letter."""
    return {prompt_digest(row).sha256 for row in rows(text)}


@pytest.mark.parametrize(
    ("rollout", "bad", "result"),
    [
        ("aabbcc", "", "aabbcc"),
        ("aabbcc", "b", "aaaccc"),
        ("aabbcc", "a", "bbbbcc"),
        ("aabbcc", "ab", "cccccc"),
        ("aabb", "ab", "zzzz"),
        ("", "a", ""),
    ],
)
def test_the_nearest_row_that_stays_takes_the_place(rollout: str, bad: str, result: str) -> None:
    """Of two at the same distance the earlier one; a row of the data set if none stays."""
    replaced = replaced_rows(rows(rollout), digests(bad), lambda: {"prompt": "z"})
    assert "".join(replaced.get(i, row)["prompt"] for i, row in enumerate(rows(rollout))) == result


def test_nothing_is_replaced_if_the_data_set_has_nothing_else() -> None:
    """Generation fails then as it did before, and the run ends with its report."""
    assert replaced_rows(rows("aa"), digests("a"), lambda: None) == {}


@hypothesis.given(strategies.text("abc", max_size=12), strategies.text("abc", max_size=3))
def test_every_quarantined_row_is_replaced_and_no_other(rollout: str, bad: str) -> None:
    """By a row that is not quarantined."""
    replaced = replaced_rows(rows(rollout), digests(bad), lambda: {"prompt": "z"})
    assert set(replaced) == {position for position, letter in enumerate(rollout) if letter in bad}
    assert not {row["prompt"] for row in replaced.values()} & set(bad)


def test_a_prompt_is_known_by_its_content() -> None:
    """Other columns do not count, nor does the order of keys in a message."""
    message = {"role": "user", "content": "2 + 2"}
    swapped = {"content": "2 + 2", "role": "user"}
    assert prompt_digest({"prompt": [message], "answer": 4}) == prompt_digest(
        {"prompt": [swapped], "answer": 5}
    )
    assert prompt_digest({"prompt": "a"}) != prompt_digest({"prompt": "b"})
    assert prompt_digest({"question": "a"}) != prompt_digest({"question": "b"})


def test_an_object_in_a_prompt_counts_by_its_type() -> None:
    """Its text may contain its address, which differs between attempts."""
    assert prompt_digest({"prompt": [object()]}) == prompt_digest({"prompt": [object()]})


def test_the_preview_is_short_text() -> None:
    """Also of a prompt that is not ASCII, or not valid text."""
    assert prompt_digest({"prompt": "x" * 1000}).preview == "x" * MAX_PREVIEW_CHARACTERS
    assert prompt_digest({"prompt": "\ud800 é"}).preview == "\\ud800 \\xe9"
