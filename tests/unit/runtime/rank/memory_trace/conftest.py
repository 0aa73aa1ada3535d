"""What the tests of the memory trace share: steps of a script with its trace, and lines of their own files."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grpo_run.runtime.rank.memory_trace import holders, numbered_attributes, script_files, tracer
from grpo_run.runtime.rank.memory_trace.finding import TraceFinding

STEPS = 14


class NoHistory:
    """Stands for the history of an allocator, without a device."""

    def begin(self) -> None:
        """Begin nothing."""

    def end(self) -> None:
        """End nothing."""


@pytest.fixture
def no_history() -> Any:
    """The history of the CUDA allocator where there is none."""
    return NoHistory()


@pytest.fixture
def line_of(request: pytest.FixtureRequest) -> Callable[[str], int]:
    """Returns the first line of the test's file that begins with a text."""

    def find(text: str) -> int:
        lines = Path(request.path).read_text().splitlines()
        return next(number for number, line in enumerate(lines, 1) if line.strip().startswith(text))

    return find


@pytest.fixture(autouse=True)
def _own_files(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """The script is the test's own file and what it has written: other tests use the same names for other things."""
    imported = script_files.user_files
    own = str(request.path)

    def of_this_test() -> tuple[str, ...]:
        return tuple(file for file in imported() if file == own or Path(file).is_relative_to(tmp_path))

    for module in (script_files, holders, numbered_attributes, tracer):
        monkeypatch.setattr(module, "user_files", of_this_test)


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch, no_history: Any) -> Callable[..., list[TraceFinding]]:
    """Runs steps and returns what is found. Each step is looked at."""
    monkeypatch.setattr(tracer, "SHARE", 1e9)

    def run(step: Callable[[int], object], steps: int = STEPS) -> list[TraceFinding]:
        found: list[TraceFinding] = []
        trace = tracer.MemoryTrace(found.append, no_history, pytest.fail)
        try:
            for number in range(1, steps + 1):
                step(number)
                trace.step_ended(number)
        finally:
            trace.end()
        return found

    gc.collect()
    gc.freeze()  # not undone: later collections would visit all objects of the libraries
    return run
