"""Mean time between failures of a run, from its own history and one prior observation. Pure.

Called when the journal is replayed (`history.py`). `trainers.saving.cadence` computes the snapshot interval
from it.
"""

from __future__ import annotations

PRIOR_FAILURE_SECONDS = 4 * 3600.0
"""Assumed before the run has shown otherwise: one failure in four hours. The 16,384 GPUs of Llama 3's
pre-training failed about as often (arXiv:2407.21783, section 3.3.4: 466 interruptions in 54 days are one in
2.8 hours), so it is pessimistic for 64 GPUs.
"""


def mean_time_between_failures(elapsed_seconds: float, failures: int) -> float:
    """Return the mean time between failures in seconds: the run's history plus one prior observation.

    Args:
        elapsed_seconds: duration of the run, over all attempts.
        failures: number of interruptions.
    """
    return (elapsed_seconds + PRIOR_FAILURE_SECONDS) / (failures + 1)
