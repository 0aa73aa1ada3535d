"""Do two output directories differ only in a part of the name that every start of the script generates?

Scripts put the time, a process id or a random part into the name, so a restarted script does not find its
checkpoints. Two names are taken as one only with evidence: the part that differs is the time at which each
name was chosen, the process id, or random by its form. `fold-1` and `fold-2` are two directories. Called by
`identification.py`. Pure.
"""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

from grpo_run.runtime.continuity.train_calls import CallDirectory

RANDOM = re.compile(
    r"[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}"  # uuid4()
    r"|(?<![0-9A-Za-z])(?=[0-9]*[a-f])(?=[a-f]*[0-9])[0-9a-f]{8,40}(?![0-9A-Za-z])"  # uuid4().hex, also shortened
)
TEMPORARY_CHARACTERS = 8
"""Of a name by `tempfile.mkdtemp`."""
NUMBER = re.compile(r"[0-9]{10}\.[0-9]+|[0-9]+")
MARGIN_SECONDS = 60.0
"""A name may have the minute before or after."""
MAX_MINUTES = 720
"""How far back a name may have been chosen, if only its minute is known."""
MAX_SECONDS = 3600
"""The same with its second."""
DATES = ("%Y%m%d", "%d%m%Y", "%m%d%Y", "%y%m%d", "%m%d", "%d%m")
MINUTES = ("%H%M", "%I%M")
SECONDS = ("%H%M%S", "%I%M%S")
FRACTION_DIGITS = (3, 6, 9)


def is_same_directory(old: CallDirectory, new: CallDirectory) -> bool:
    """Return whether the names of two directories differ only in a part that is made at each start."""
    parts, others = Path(old.path).parts, Path(new.path).parts
    if len(parts) != len(others):
        return False
    differing = [index for index, pair in enumerate(zip(parts, others, strict=True)) if pair[0] != pair[1]]
    return bool(differing) and all(
        _differs_by_itself(parts[index], others[index], old, new)
        or _is_temporary(Path(*parts[:index]), parts[index], others[index])
        for index in differing
    )


def _differs_by_itself(part: str, other: str, old: CallDirectory, new: CallDirectory) -> bool:
    plain, other_plain = RANDOM.sub("<random>", part), RANDOM.sub("<random>", other)
    if plain == other_plain:
        return True
    if NUMBER.sub("#", plain) != NUMBER.sub("#", other_plain):
        return False
    numbers = list(zip(NUMBER.findall(plain), NUMBER.findall(other_plain), strict=True))
    differing = [
        index
        for index, (a, b) in enumerate(numbers)
        if a != b and not (old.pid and (a, b) == (str(old.pid), str(new.pid)))
    ]
    return _are_times([a for a, _ in numbers], differing, old) and _are_times(
        [b for _, b in numbers], differing, new
    )


def _are_times(numbers: list[str], differing: list[int], directory: CallDirectory) -> bool:
    """Whether all numbers at the indexes `differing` are parts of the time at which the name was chosen."""
    began, ended = directory.not_before - MARGIN_SECONDS, directory.not_after + MARGIN_SECONDS
    starts = [0, *accumulate(map(len, numbers))]
    digits = "".join(numbers)
    covered = [False] * len(digits)
    for text in set(_times_of(began, ended)):
        at = digits.find(text)
        while at >= 0:
            covered[at : at + len(text)] = [True] * len(text)
            at = digits.find(text, at + 1)
    is_time = [all(covered[starts[index] : starts[index + 1]]) for index in range(len(numbers))]
    for index, number in enumerate(numbers):
        if (len(number) in (10, 13) or "." in number) and began <= int(
            number[:10]
        ) <= ended:  # since the epoch
            is_time[index] = True
        elif index and is_time[index - 1]:  # a fraction of a second has any digits
            is_time[index] |= len(number) in FRACTION_DIGITS
    return all(is_time[index] for index in differing)


def _times_of(began: float, ended: float) -> Iterator[str]:
    """Yield every date and time of day of a period, in local time and in UTC."""
    seconds = int(ended - began) + 1
    for forms, step, count in (
        ((*DATES, *MINUTES), 60, min(MAX_MINUTES, seconds // 60 + 1)),
        (SECONDS, 1, min(MAX_SECONDS, seconds)),
    ):
        for back in range(count):
            for clock in (time.localtime(ended - back * step), time.gmtime(ended - back * step)):
                for form in forms:
                    yield time.strftime(form, clock)


def _is_temporary(parent: Path, part: str, other: str) -> bool:
    """Whether both are names that `tempfile.mkdtemp` makes in the folder of temporary files."""
    if str(parent) not in {tempfile.gettempdir(), str(Path(tempfile.gettempdir()).resolve())}:
        return False
    random, other_random = part[-TEMPORARY_CHARACTERS:], other[-TEMPORARY_CHARACTERS:]
    return (
        part[:-TEMPORARY_CHARACTERS] == other[:-TEMPORARY_CHARACTERS]
        and re.fullmatch(r"[a-z0-9_]{8}", random) is not None
        and re.fullmatch(r"[a-z0-9_]{8}", other_random) is not None
    )
