"""How far the weights that two runs end with are apart."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors.numpy import load_file


def relative_difference(found: Path, expected: Path, file: str = "weights.safetensors") -> float:
    """Return the norm of the difference of all weights, relative to the norm of the weights.

    Not by parameter: the bias of the keys in attention has a gradient of 0 but for rounding, which Adam
    scales up. Computed by numpy, so that no worker of pytest imports torch for it.

    Args:
        found, expected: output directories, into which the scripts of `tests/scripts` write their final
            weights.
        file: in both.
    """
    ours, theirs = load_file(found / file), load_file(expected / file)
    assert ours.keys() == theirs.keys()
    weights = {name: weight.astype(np.float64) for name, weight in theirs.items()}
    difference = [np.linalg.norm(ours[name] - weight) for name, weight in weights.items()]
    return float(np.linalg.norm(difference) / np.linalg.norm([*map(np.linalg.norm, weights.values())]))
