"""What is wrong is refused in one line, before anything is started."""

from __future__ import annotations

import contextlib

import pytest

from grpo_run.runtime.errors import UsageError
from grpo_run.runtime.launching._configuration import check_descriptors


@pytest.mark.parametrize(("ranks", "limit", "refused"), [(8, 256, False), (9, 256, True), (64, -1, False)])
def test_a_limit_of_open_files_that_is_too_low_is_refused(ranks: int, limit: int, refused: bool) -> None:
    """The line says what to type; -1 is no limit."""
    expected = pytest.raises(UsageError, match=r"ulimit -n 272") if refused else contextlib.nullcontext()
    with expected:
        check_descriptors(ranks, limit)
