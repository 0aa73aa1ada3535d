"""Two assumptions together, where no single one accounts for what was observed. Called by `cli.planning`.

A pair says less than a single assumption: of many pairs some come close by chance. So only close ones are returned, and none whose
members do not both bring it closer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

from grpo_run.trainers.planning.explaining.assumptions import Explanation, explained_by_trace
from grpo_run.trainers.planning.prediction import Prediction, Predictor

CLOSE = 1.25
"""Ratio of a figure to the observation, either way, up to which it is said to account for it."""
MOST = 4
"""Pairs that are returned."""
TRACED = 8
"""Pairs of changed jobs that are traced, those first whose sum is nearest."""


def together(
    predictor: Predictor, prediction: Prediction, alone: Sequence[Explanation], observed_bytes: float
) -> list[Explanation]:
    """Return pairs of assumptions that account for an observation better than both of their members, the best fit first.

    Args:
        predictor: of the model.
        prediction: of the job as it is described.
        alone: single assumptions.
        observed_bytes: what was observed.
    """
    base = prediction.allocated_bytes
    pairs = [
        (one, other, base + sum(member.allocated_bytes - base for member in (one, other)))
        for one, other in combinations(alone, 2)
        if one.combines and other.combines and not one.changes.keys() & other.changes.keys()
    ]
    pairs.sort(key=lambda pair: abs(math.log(max(pair[2], 1.0) / observed_bytes)))
    found, traced = [], 0
    for one, other, size in pairs:
        if one.changes and other.changes:
            if traced == TRACED:
                continue
            traced += 1
            job = replace(prediction.job, **one.changes, **other.changes)
            pair = explained_by_trace(
                predictor.predict(job),
                f"{one.name}+{other.name}",
                f"{one.assumption}, and {other.assumption}",
            )
        else:
            pair = Explanation(
                name=f"{one.name}+{other.name}",
                assumption=f"{one.assumption}, and {other.assumption}",
                arithmetic=(
                    "as described ",
                    base,
                    f" + {one.name} ",
                    one.allocated_bytes - base,
                    f" + {other.name} ",
                    other.allocated_bytes - base,
                ),
                allocated_bytes=size,
            )
        nearest = min(one.distance(observed_bytes), other.distance(observed_bytes))
        if pair.distance(observed_bytes) < min(nearest, math.log(CLOSE)):
            found.append(pair)
    return sorted(found, key=lambda pair: pair.distance(observed_bytes))[:MOST]
