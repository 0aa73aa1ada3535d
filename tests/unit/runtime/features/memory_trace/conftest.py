"""What the tests of the memory trace share: steps of a script with its trace, and lines of their files."""

from __future__ import annotations

import gc
import importlib.util
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from grpo_run.runtime.features.memory_trace import _tracer
from grpo_run.runtime.features.memory_trace.events import MemoryFound


@pytest.fixture
def run_script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., list[MemoryFound]]:
    """Runs a script in which each call of `made()` ends a step, and returns what is found."""
    monkeypatch.setattr(_tracer, "SHARE", 1e9)

    def run(source: str) -> list[MemoryFound]:
        found: list[MemoryFound] = []
        trace = _tracer.MemoryTrace(found.append, pytest.fail)
        step = 0

        def made() -> torch.Tensor:
            nonlocal step
            if step:
                trace.step_ended(step)
            step += 1
            return torch.full((40,), float(step))

        file = tmp_path / "script_of_test.py"
        file.write_text(textwrap.dedent(source))
        specification = importlib.util.spec_from_file_location("script_of_test", file)
        assert specification is not None
        assert specification.loader is not None
        script = importlib.util.module_from_spec(specification)
        monkeypatch.setitem(sys.modules, "script_of_test", script)
        vars(script).update(torch=torch, made=made)
        specification.loader.exec_module(script)
        return found

    gc.collect()
    gc.freeze()  # not undone: later collections would visit all objects of the libraries
    return run
