"""Decisions that all ranks make together, for loops that a script writes itself: `any`, `all`, `while_any`.

If one rank ends a generation loop while another continues, the next collective never completes. With these
functions every rank contributes its own flag and receives the same answer, so that all ranks leave together:

    from grpo_run.trainers import consensus

    for _ in consensus.while_any(lambda: not finished()):
        step()

Start reading at `functions.py`. May import `trainers.rank`, `runtime` and `watchdog`; importing it does not
import torch.
"""

from __future__ import annotations

from grpo_run.trainers.consensus.functions import all, any, while_any

__all__ = ["all", "any", "while_any"]
