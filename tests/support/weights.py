"""How far the weights that two runs end with are apart."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file


def relative_difference(found: Path, expected: Path, file: str = "weights.safetensors") -> float:
    """Return the norm of the difference of all weights, relative to the norm of the weights.

    Not by parameter: the bias of the keys in attention has a gradient of 0 but for rounding, which Adam
        scales up.

    Args:
        found, expected: output directories, into which the scripts of `tests/scripts` write their final
            weights.
        file: in both.
    """
    ours, theirs = load_file(found / file), load_file(expected / file)
    assert ours.keys() == theirs.keys()
    difference = torch.stack([(ours[name] - theirs[name]).double().norm() for name in theirs]).norm()
    return float(difference / torch.stack([theirs[name].double().norm() for name in theirs]).norm())
