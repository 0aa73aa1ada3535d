"""The same test cases over a Trainer and over a hand-written loop: two scripts with the same arguments.

A case that is not marked `full` for the loop runs in `make test` for both.
"""

from __future__ import annotations

import pytest

TRAINER, LOOP = "grpo.py", "grpo_loop.py"
both = pytest.mark.parametrize("script", [TRAINER, LOOP])
loop_in_full = pytest.mark.parametrize("script", [TRAINER, pytest.param(LOOP, marks=pytest.mark.full)])


def missing_phases(script: str) -> frozenset[str]:
    """Phases of a step that a script does not enter: a loop does not tell generation from the rest of its
    body.
    """
    return frozenset({"generate"}) if script == LOOP else frozenset()
