"""What every test shares: quiet, repeatable property tests, and an environment that no launcher has touched."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from support.runs import Run

from grpo_run.runtime.record.journal import Journal, read_journal

# no deadline: how long an example takes says something about the machine only; the same examples each time, so that
# a change is judged by what it changed (`pytest --hypothesis-profile=explore` looks further)
settings.register_profile("grpo-run", deadline=None, max_examples=60, database=None, derandomize=True)
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile("grpo-run")


@pytest.fixture(autouse=True)
def _outside_any_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees the variables of a launcher that happens to run the tests."""
    for name in list(os.environ):
        if name.startswith(("GRPO_RUN_", "PET_", "TORCHELASTIC_")):
            monkeypatch.delenv(name)


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    """A journal with clocks that stand still."""
    made = Journal(tmp_path / "journal.jsonl", "run-1", wall=lambda: 1000.0, monotonic=lambda: 10.0)
    made.attempt = 0
    return made


@pytest.fixture
def events(tmp_path: Path) -> Callable[[], list[dict[str, Any]]]:
    """What the journal holds now."""
    return lambda: list(read_journal(tmp_path / "journal.jsonl"))


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Makes runs of real processes in the test's folder and ends what is left of them."""
    made: list[Run] = []

    def make(*arguments: str, **options: Any) -> Run:
        run = Run(tmp_path, arguments, **options)
        made.append(run)
        return run

    yield make
    for run in made:
        run.close()
