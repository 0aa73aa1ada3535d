"""States of the global random generators of Python, NumPy and torch, sent to a worker and back.

A reward function in a worker thus draws what it would have drawn in the rank, and the rank's next draws are
those after it. Called around what may be done again: a call in another
process, rewards that are repeated, a resume. Generators that are not loaded here
are left alone.
"""

from __future__ import annotations

import pickle
import random
import sys
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class GeneratorStates:
    """One state of each generator; None for a library that is not loaded. The state of torch is that of its
    CPU generator.
    """

    python: tuple[Any, ...]
    numpy: bytes | None
    torch: bytes | None


def read_generators() -> GeneratorStates:
    """Return the present states in this process."""
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    return GeneratorStates(
        python=random.getstate(),
        numpy=pickle.dumps(numpy.random.get_state()) if numpy is not None else None,
        torch=torch.get_rng_state().numpy().tobytes() if torch is not None else None,
    )


def write_generators(states: GeneratorStates) -> None:
    """Set the generators of this process. A library that is not loaded here is loaded first."""
    random.setstate(states.python)
    if states.numpy is not None:
        import numpy

        numpy.random.set_state(pickle.loads(states.numpy))
    if states.torch is not None:
        import torch

        torch.set_rng_state(torch.frombuffer(bytearray(states.torch), dtype=torch.uint8))
