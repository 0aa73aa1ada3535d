"""Fixtures of tests that start real processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.runs import Run


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Makes runs in the test's folder and ends what is left of them."""
    made: list[Run] = []

    def make(*arguments: str, **options: Any) -> Run:
        run = Run(tmp_path, arguments, **options)
        made.append(run)
        return run

    yield make
    for run in made:
        run.close()
