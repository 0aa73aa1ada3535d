"""A plain TRL GRPO script whose code waits, legitimately and long, where `--oddity` says.

`--oddity WAIT:SECONDS@PLACE[:STEP[:RANK]]`, several times: a wait of `waits.py` on one rank, at a place of
`places.py`. `--group-oddity NAME:SECONDS@STEP`: communication of `groups.py` on every
rank, at the end of a step. The weights are those of a run without them. The script does not know what
launches it.
"""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass

import groups
import places
import waits

WORDS = re.compile(r"([\w-]+):([\d.]+)@([\w-]+)(?::(\d+))?(?::(\d+))?")


@dataclass(frozen=True, kw_only=True)
class Oddity:
    """A wait of so many seconds at a place; in places of every step, in one step."""

    wait: str
    seconds: float
    place: str
    step: int
    rank: int


def oddity(text: str) -> Oddity:
    """Parse `WAIT:SECONDS@PLACE[:STEP[:RANK]]`."""
    match = WORDS.fullmatch(text)
    if match is None or match[1] not in waits.WAITS or match[3] not in places.PLACES:
        raise ValueError(text)
    return Oddity(
        wait=match[1], seconds=float(match[2]), place=match[3], step=int(match[4] or 6),
        rank=int(match[5] or 1)
    )  # fmt: skip


class Oddities:
    """Waits at the places asked for, each once."""

    def __init__(self, waits_there: list[Oddity], groups_there: list[str]) -> None:
        self._rank = int(os.environ.get("RANK", "0"))
        self._left = [one for one in waits_there if one.rank == self._rank]
        self._groups = {}
        for text in groups_there:
            name, seconds, step = re.split("[:@]", text)
            self._groups.setdefault(int(step), []).append((name, float(seconds)))

    def visit(self, place: str, step: int) -> None:
        """Wait if it is asked for here."""
        for one in list(self._left):
            if one.place == place and (place not in places.IN_EVERY_STEP or one.step == step):
                self._left.remove(one)
                began = time.monotonic()
                waits.WAITS[one.wait](one.seconds)
                took = time.monotonic() - began
                print(f"rank {self._rank}: {one.wait} at {place} took {took:.1f} s", flush=True)
        if place == "callback":
            for name, seconds in self._groups.pop(step, []):
                groups.GROUPS[name](seconds)
                print(f"rank {self._rank}: {name} done", flush=True)


def main() -> None:
    parser = places.argument_parser(__doc__)
    parser.add_argument("--oddity", type=oddity, action="append", default=[])
    parser.add_argument("--group-oddity", action="append", default=[])
    arguments = parser.parse_args()
    places.run(arguments, Oddities(arguments.oddity, arguments.group_oddity).visit)


if __name__ == "__main__":
    main()
