"""The sentence of each kind of finding."""

from __future__ import annotations

from typing import Any

import pytest

from grpo_run.runtime.rank.memory_trace._finding import Place, TraceFinding, sentence


def finding(**fields: Any) -> TraceFinding:
    """Tensors that a list keeps, otherwise as given."""
    return TraceFinding(
        **{
            "kind": "growth",
            "tensors": 64,
            "bytes": 64 * 8 * 174 * 50257 * 4,
            "shape": (8, 174, 50257),
            "dtype": "float32",
            "since_step": 3,
            "steps": 5,
            "made_at": Place(file="/home/policy.py", line=133),
            "holder": "list `history` of Collector",
            "held_at": Place(file="/home/collector.py", line=40),
            **fields,
        }
    )


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"details": {"bytes_a_step": 2**20, "steps_left": 9, "free_bytes": 2**21}},
            "(collector.py:40): it has kept tensors of 5 steps, 1.0 MiB a step, which does not fit into",
        ),
        (
            {"kind": "graph", "made_in": Place(file="/lib/site-packages/transformers/model.py", line=9)},
            (
                "policy.py:133 (in transformers/model.py:9), saved by the autograd graph of a tensor that is"
                " held"
            ),
        ),
        (
            {"kind": "growing", "steps": 20},
            "still growing: 64 tensors [8, 174, 50257] float32 (16.7 GiB) alive since step 3, made at",
        ),
        ({"kind": "growing", "steps": 20}, "it has kept tensors of 20 steps; cannot tell whether"),
        (
            {"kind": "growing", "steps": 20, "details": {"first_step": 3, "first_bytes": 1024}},
            "still growing: a tensor [8, 174, 50257] float32 (16.7 GiB) from 1.0 KiB in step 3",
        ),
        (
            {"kind": "graph", "tensors": 1, "made_at": None},
            "1 tensor [8, 174, 50257] float32 (16.7 GiB) alive since",
        ),
        ({"holder": None, "held_at": None}, "held by something that has no name in the script: "),
        (
            {"kind": "cycle", "details": {"collected": True}},
            "(16.7 GiB) that only garbage collections have freed since step 3, made at policy.py:133",
        ),
        (
            {
                "kind": "padding",
                "shape": (8, 1024),
                "tensors": 20,
                "holder": None,
                "held_at": None,
                "details": {"width": 1024, "longest": 174, "share": 0.17},
            },
            "to 1024 tokens, of which the longest row of 20 batches in 5 steps uses 174 and 17% are real,",
        ),
    ],
)
def test_a_finding_is_one_line_that_names_line_and_holder(fields: dict[str, Any], said: str) -> None:
    """Paths are relative to the working directory, or to the folder of the installed packages."""
    text = sentence(finding(**fields), "/home")
    assert said in text
    assert "\n" not in text
