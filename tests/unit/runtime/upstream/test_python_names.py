"""Filters of warnings can be changed for a moment without a repetition of what was shown."""

from __future__ import annotations

import warnings

import pytest

from grpo_run.runtime.rank.saving.trainer_contents import _quiet
from grpo_run.runtime.upstream.process_names import FILTERS_CHANGED


def warn(text: str) -> None:
    """Warn at one line, as a script does in a loop."""
    warnings.warn(text, stacklevel=1)


def test_a_change_of_the_filters_calls_the_name() -> None:
    """Where it does not, warnings would be repeated after each snapshot."""
    assert callable(getattr(warnings, FILTERS_CHANGED))


def test_a_snapshot_shows_no_warning_and_repeats_none_of_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is first said in a snapshot is said again by the script's own save."""
    shown: list[str] = []
    monkeypatch.setattr(warnings, "showwarning", lambda message, *rest: shown.append(str(message)))
    monkeypatch.setattr(warnings, "filters", [("default", None, Warning, None, 0)])
    warn("once")
    before = list(warnings.filters)
    with _quiet():
        warn("once")
        warn("of a save")
        with warnings.catch_warnings():  # as torch's schedulers do in `state_dict`
            warnings.simplefilter("always")
    assert list(warnings.filters) == before
    warn("once")
    warn("of a save")
    assert shown == ["once", "of a save"]
