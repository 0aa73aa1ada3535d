"""The unit of computing that pads a step; used by the script and by its calibration.

Imports no large package. Does not choose the number of units per step.
"""

from __future__ import annotations

import hashlib

BLOCK = bytes(16 * 1024)
"""Above 2047 bytes hashlib releases the GIL, as a tensor operation does."""


def compute(units: int) -> None:
    """Hash `BLOCK` `units` times."""
    for _ in range(units):
        hashlib.sha256(BLOCK).digest()
