"""Ranks given by the collectives that they have called, and what these prove: the shell of transcripts.

A call is the name of one of `CALLS`, `at:88` for an all-reduce of this line, or
`group/operation:line:elements` (line `-`: issued by C++), and may be repeated: `gather*3`. All calls of a
rank have completed, and it waits in the last; `.`, `+` or `!` after a call says that it has completed, is
enqueued, or is waited for. Fields of its record follow in brackets: `gather[thread=2,members=0-1]`.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from grpo_run.watchdog.deadlocks.collectives import Collective, CollectiveProgress, can_meet, needed_members
from grpo_run.watchdog.deadlocks.positions import Position, ThreadReport, with_threads, without_other_threads
from grpo_run.watchdog.deadlocks.proof import prove
from grpo_run.watchdog.verdict import Location

CALLS = {
    "gather": "0/all_gather:88:3", "reduce": "0/all_reduce:91:7", "later": "0/all_reduce:95:7",
    "vote": "grpo_run/vote/all_reduce:12:4", "pair": "pair/all_reduce:50:2",
    "consensus": "grpo_run/consensus/all_gather:40:33",
}  # fmt: skip
SEQUENCES = {"past": "gather reduce vote " * 3, "step": "gather reduce later vote"}
CALL = re.compile(
    r"(?P<group>[^\[]+)/(?P<operation>\w*):(?P<line>\d+|-):(?P<elements>[\d,]*)"
    r"(?P<progress>[.+!]?)(\[(?P<fields>.*)\])?"
)
PROGRESS = {
    ".": CollectiveProgress.completed, "+": CollectiveProgress.enqueued, "!": CollectiveProgress.waiting,
}  # fmt: skip


def ranks_of(text: str) -> tuple[int, ...]:
    """The numbers in `0-1-3`."""
    return tuple(int(number) for number in text.split("-") if number)


FIELDS: dict[str, Callable[[str], Any]] = {
    "members": ranks_of, "root": int, "count": int, "sequence": int, "thread": str, "timeout_seconds": float,
    "sizes": lambda text: tuple(ranks_of(size) for size in text.split("|")) if text else (),
    "dtypes": lambda text: tuple(text.split("|")) if text else (),
}  # fmt: skip
"""Fields of a record that have a value; others are true if they are named."""


def at_line(line: int) -> Location:
    """A line of the user's script."""
    return Location(file="/home/user/train.py", line=line, function="main")


def written_out(words: tuple[str, ...]) -> Iterator[re.Match[str]]:
    """The calls that these words stand for."""
    for word in words:
        name, suffix = re.fullmatch(r"([^\[*.+!]*)(.*)", word).groups()  # type: ignore[union-attr]
        times = re.match(r"\*(\d+)", suffix)
        if name in SEQUENCES:
            found = list(written_out(tuple(SEQUENCES[name].split())))
        else:
            plain = f"0/all_reduce:{name[3:]}:7" if name.startswith("at:") else CALLS.get(name, name)
            call = CALL.fullmatch(plain + suffix[times.end() if times else 0 :])
            assert call is not None, word
            found = [call]
        yield from found * (int(times[1]) if times else 1)


def records(*words: str) -> tuple[Collective, ...]:
    """What a rank enqueued that made these calls."""
    counts: Counter[str] = Counter()
    made = []
    calls = list(written_out(words))
    for index, call in enumerate(calls):
        counts[call["group"]] += 1
        last = CollectiveProgress.waiting if index == len(calls) - 1 else CollectiveProgress.completed
        told = dict((*one.split("="), "")[:2] for one in call["fields"].split(",")) if call["fields"] else {}
        record = Collective(
            group=call["group"], sequence=counts[call["group"]], operation=call["operation"],
            sizes=((int(call["elements"]),),) if call["elements"] else (),
            dtypes=("Float",) if call["elements"] else (),
            progress=PROGRESS.get(call["progress"], last),
            location=None if call["line"] == "-" else at_line(int(call["line"])),
        )  # fmt: skip
        made.append(replace(record, **{n: FIELDS[n](v) if n in FIELDS else True for n, v in told.items()}))
    return tuple(made)


FACTS = ("exited", "outside_training", "left_early", "in_backward")


class DeadlockShell:
    """Ranks, one after another, and the proof that they allow."""

    def __init__(self) -> None:
        self.positions: dict[int, Position] = {}

    def rank(self, *words: str, keep: str = "", without: str = "", **options: str) -> None:
        """Add the next rank. Words that are no call are facts: `unseen`, `exited`, `outside_training`,
        `left_early`, `in_backward`.

        Args:
            keep: how many of its newest records are left.
            without: numbers of records that are missing.
            options: `threads`, the threads that wait, if not those that its records name (`?`: not known);
                `issued`, as JSON; `stack_location`.
        """
        flags = {word: True for word in words if word in FACTS}
        known = records(*(word for word in words if word not in (*flags, "unseen")))
        known = tuple(one for number, one in enumerate(known) if number not in ranks_of(without))
        given: dict[str, Any] = dict(flags)
        if "issued" in options:
            given["issued"] = json.loads(options["issued"])
        if "stack_location" in options:
            given["stack_location"] = at_line(int(options["stack_location"]))
        position = Position(
            rank=len(self.positions),
            records=None if "unseen" in words else known[-int(keep) :] if keep else known,
            **given,
        )
        threads = options.get("threads")
        if threads is None:
            position = without_other_threads(position)
        elif threads != "?":
            position = replace(position, waiting_threads=frozenset(filter(None, threads.split(","))))
        self.positions[position.rank] = position

    def report(self, *facts: str, rank: str = "0", waiting: str = "1,2", in_backward: str = "") -> str:
        """A rank reports its threads, of which thread 3 is passive; return those that wait.

        Args:
            facts: `active`, `futures`, or `none` for no report.
        """
        said = ThreadReport(
            waiting=dict.fromkeys(waiting.split(","), 40), passive={"3": 60},
            active=("reader in read",) if "active" in facts else (),
            in_backward=int(in_backward) if in_backward else None, issued={"0": 3},
            uses_futures="futures" in facts,
        )  # fmt: skip
        known = with_threads(self.positions[int(rank)], None if "none" in facts else said)
        self.positions[int(rank)] = known
        threads = "?" if known.waiting_threads is None else " ".join(sorted(known.waiting_threads))
        return f"waits: {threads}{' in backward' * known.in_backward}; issued {dict(known.issued)}"

    def prove(self, world: str = "") -> str:
        """What these ranks prove, and begin again."""
        positions, self.positions = self.positions, {}
        found = prove(positions, world_size=int(world) if world else len(positions))
        if found is None:
            return "nothing"
        at = (
            f"{rank} {f'{one.operation} #{one.sequence} of {one.group}' if one else 'nowhere'}"
            for rank, one in found.at.items()
        )
        lines = " ".join(f"{rank}:{place.line}" for rank, place in found.locations.items())
        said = [
            f"{found.cause} by {found.culprits}, waiting {found.waiters}",
            found.sentence, found.mismatch or "", f"at {', '.join(at)}; lines {lines}",
        ]  # fmt: skip
        return "\n".join(filter(None, said))

    def meets(self, one: str, other: str) -> str:
        """Whether two calls can complete one another, which depends on no order."""
        (first,), (second,) = records(one), records(other)
        assert can_meet(first, second) is can_meet(second, first)
        return str(can_meet(first, second))

    def needs(self, call: str) -> str:
        """Whom ranks 0, 1 and 2 need in this call; `all` if the members are not known."""
        found = (needed_members(rank, records(call)[0]) for rank in range(3))
        return " ".join("all" if one is None else f"{one}" for one in found)
