"""The weights that a run ends with, from its last checkpoint, and how far two of them are apart."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file


def relative_difference(found: Path, expected: Path) -> float:
    """Return the norm of the difference of all weights, relative to the norm of the weights.

    Not by parameter: the bias of the keys in attention has a gradient of 0 but for rounding, which Adam scales up.

    Args:
        found, expected: output directories; the checkpoint with the highest step counts.
    """
    ours, theirs = _last_weights(found), _last_weights(expected)
    assert ours.keys() == theirs.keys()
    difference = torch.stack([(ours[name] - theirs[name]).double().norm() for name in theirs]).norm()
    return float(difference / torch.stack([theirs[name].double().norm() for name in theirs]).norm())


def _last_weights(output: Path) -> dict[str, torch.Tensor]:
    checkpoints = sorted(output.glob("checkpoint-*"), key=lambda one: int(one.name.rpartition("-")[2]))
    assert checkpoints, f"no checkpoint in {output}"
    return load_file(checkpoints[-1] / "model.safetensors")
