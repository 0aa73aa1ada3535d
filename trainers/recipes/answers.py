"""The number after `####`, in GSM8K's reference solutions and in what a model writes.

Called by the rewards and by the reader of problems. Exact: numbers are `Decimal`, never floats. Does not
judge; `rewards.py` does.
"""

from __future__ import annotations

import re
from decimal import Decimal

MARKER = "####"

_NUMBER = re.compile(
    r"""
    (?P<minus> (?<! [\w.] ) - \s? )? (?: [$€£] (?P<inner_minus> - )? )?
    (?P<digits> (?: [0-9]{1,3} (?: ,[0-9]{3} )+ (?![0-9]) | [0-9]+ ) (?: \.[0-9]+ )? | \.[0-9]+ )
    """,
    re.VERBOSE,
)


def final_answer(text: str) -> Decimal | None:
    """The number on the line of the last `####`, or None.

    Currency signs, thousands' commas, units, emphasis and a closing full stop are passed over. A line with two
    numbers ("5 + 3 = 8", "3/4", "12,13") gives None: picking one would be a guess, and a model that is paid
    for guesses learns to list candidates.
    """
    _, marker, tail = text.rpartition(MARKER)
    if not marker:
        return None
    line = tail.lstrip().partition("\n")[0].replace("−", "-")
    found = list(_NUMBER.finditer(line))
    if len(found) != 1:
        return None
    match = found[0]
    value = Decimal(match["digits"].replace(",", ""))
    return -value if match["minus"] or match["inner_minus"] else value
