"""The unit of computing that pads a step: shared by the script that does it and the benchmark that times it.

Imports nothing heavy. Does not decide how many units a step does.
"""

from __future__ import annotations

import hashlib

BLOCK = bytes(16 * 1024)
"""Above 2047 bytes hashlib lets go of the GIL, as a tensor operation would."""


def compute(units: int) -> None:
    """Hash `BLOCK` so many times."""
    for _ in range(units):
        hashlib.sha256(BLOCK).digest()
