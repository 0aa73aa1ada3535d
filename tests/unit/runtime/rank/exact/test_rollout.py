"""The micro-step counter and the rollout in use are saved and restored."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from support.exact import Trainer, read_json


def test_the_rollout_in_use_is_restored(again: Callable[..., Any]) -> None:
    """With tensors, None and other values of its micro-batches, and the counter that decides when the next is
    generated.
    """
    rollout = [{"ids": torch.arange(4) + part, "old": None, "images": [1, 2]} for part in range(2)]
    resumed = again(Trainer(_step=5, _buffered_inputs=rollout))
    assert resumed._step == 5
    found = resumed._buffered_inputs
    assert [part["ids"].tolist() for part in found] == [[0, 1, 2, 3], [1, 2, 3, 4]]
    assert [(part["old"], part["images"]) for part in found] == [(None, [1, 2])] * 2


def test_a_used_up_rollout_is_not_saved(again: Callable[..., Any], tmp_path: Path) -> None:
    """At a boundary, the next micro-step generates a new rollout."""
    rollout = [{"ids": torch.ones(4)}] * 2
    found = again(Trainer(_step=8, _buffered_inputs=rollout))
    assert (found._step, found._buffered_inputs) == (8, None)
    assert read_json(tmp_path)["buffered_inputs"] is None


def test_a_rollout_that_could_not_be_saved_is_warned_about(
    again: Callable[..., Any], warned: list[str]
) -> None:
    """The resumed run generates a new rollout at its next micro-step."""
    found = again(Trainer(_step=5, _buffered_inputs=[{"client": object()}] * 2))
    assert found._buffered_inputs is None
    assert len(warned) == 2
    assert "after a recovery, the rollout in use is not restored" in warned[0]
    assert "does not contain the rollout in use" in warned[1]
