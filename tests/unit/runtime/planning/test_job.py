"""The checks of a job."""

from __future__ import annotations

from dataclasses import replace

import pytest

from grpo_run.runtime.errors import ConfigError
from grpo_run.runtime.planning.job import Job


@pytest.mark.parametrize(
    "wrong",
    [{"batch": 0}, {"completion": 1 << 30}, {"weights": "int4"}, {"vllm_share": 1.5}, {"layout": "tp"}],
)
def test_an_impossible_job_is_refused(wrong: dict[str, object]) -> None:
    """With one line."""
    with pytest.raises(ConfigError, match="expected"):
        replace(Job(batch=1, prompt=1, completion=1), **wrong)  # type: ignore[arg-type]
