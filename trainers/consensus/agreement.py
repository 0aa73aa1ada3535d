"""Combine the calls of all ranks: one answer, or an error that names the line of each rank.

Called by `functions.py` with what `exchange.py` received. Pure: every rank is given the same calls, so every
rank returns the same answer or raises the same error.
"""

from __future__ import annotations

import builtins
from collections.abc import Sequence

from grpo_run.runtime.errors import ConsensusError
from grpo_run.trainers.consensus.call import Call
from grpo_run.watchdog.rank_names import rank_names

MAX_PLACES = 4
"""Places that an error lists; the ranks of further ones are only counted."""


def agree(own: Call, answers: Sequence[Sequence[int]]) -> bool:
    """Return the decision of all ranks.

    Args:
        own: this rank's call.
        answers: every rank's call as it was sent, in the order of the ranks.

    Raises:
        ConsensusError: ranks are at different calls.
    """
    expected = own.encode()[1:]
    if not builtins.all(list(answer[1:]) == expected for answer in answers):
        _compare(own, answers)
    flags = [answer[0] for answer in answers]
    return bool(min(flags) if own.site.function == "all" else max(flags))


def _compare(own: Call, answers: Sequence[Sequence[int]]) -> None:
    """Raise if the calls differ in more than the number of calls so far."""
    places: dict[object, tuple[Call | None, list[int]]] = {}
    for rank, answer in enumerate(answers):
        call = Call.decode(answer)
        places.setdefault(call.place if call else None, (call, []))[1].append(rank)
    if len(places) == 1 and None not in places:
        return
    if list(places) == [None]:
        raise ConsensusError(
            f"what ranks sent in {own.site.text} is no call, on this rank either: the process group mixes up its collectives"
        )
    raise ConsensusError(describe(list(places.values())))


def describe(places: Sequence[tuple[Call | None, Sequence[int]]]) -> str:
    """Describe which ranks are at which call; the first line is short enough for a report.

    Args:
        places: the different calls and the ranks that are there; no call for a rank that is in another collective.
    """
    several = any_iteration_differs(places)
    clauses, lines = [], []
    for call, ranks in places[:MAX_PLACES]:
        who, are = rank_names(ranks), "is" if len(ranks) == 1 else "are"
        if call is None:
            clauses.append(f"{who} {are} in another collective")
            continue
        count = f"call {call.ordinal}"
        if several and call.iteration:
            count = f"iteration {call.iteration}, {count}"
        clauses.append(f"{who} {are} in {call.site.text} ({count})")
        lines.append(f"  {who}: {call.site.file}:{call.site.line}")
    others = sum(len(ranks) for _, ranks in places[MAX_PLACES:])
    if others:
        clauses.append(f"{others} more elsewhere")
    return "\n".join(
        [
            f"ranks disagree: {', '.join(clauses)}",
            "Every rank must make the same calls of consensus functions, at the same lines and equally often.",
            *lines,
        ]
    )


def any_iteration_differs(places: Sequence[tuple[Call | None, Sequence[int]]]) -> bool:
    """Whether some of the calls are different iterations of loops at one line."""
    calls = [call for call, _ in places if call is not None]
    return len({call.site for call in calls}) < len(calls)
