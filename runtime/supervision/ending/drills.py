"""Injected faults that never happened: the run did not reach their step or phase.

A drill that does not happen proves nothing, and its run must not look like one that has passed it. Called by
`run_end.py`. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from grpo_run.runtime.launch.injections.injection import Injection
from grpo_run.runtime.launch.injections.selection import remaining


def never_happened(
    injections: Iterable[Injection], fired: Collection[str], *, ranks: Collection[int]
) -> tuple[Injection, ...]:
    """Return the drills of this node's ranks that did not happen.

    Args:
        injections: of the run.
        fired: canonical texts of those that happened, from the journal of this node.
        ranks: global ranks of this node; empty if no rank was ever started, which leaves nothing out.
    """
    return tuple(
        injection for injection in remaining(tuple(injections), fired) if not ranks or injection.rank in ranks
    )


def sentence(drills: Collection[Injection], step: int, *, counted: bool) -> str:
    """Return what to say about drills that never happened; empty if there are none.

    Args:
        drills: from `never_happened`.
        step: the last step of the run.
        counted: steps were counted: the script has used a Trainer or the loop.
    """
    if not drills:
        return ""
    number = "1 drill never happened" if len(drills) == 1 else f"{len(drills)} drills never happened"
    return f"{number}: {', '.join(f'{drill} ({_reason(drill, step, counted)})' for drill in drills)}."


def _reason(drill: Injection, step: int, counted: bool) -> str:
    if not counted:
        return "without a Trainer or a loop, steps are not counted"
    if drill.step > step:
        return f"the run ended at step {step}"
    if drill.recurs:
        limit = f"{drill.tokens} tokens" if drill.tokens else f"{drill.rows} rows"
        return f"no phase {drill.phase.name} from step {drill.step} on had more than {limit}"
    return f"step {drill.step} was not run with phase {drill.phase.name}"
