"""The final answer after `####`, in GSM8K's reference solutions and in completions.

Called by `rewards.py` and `problems.py`. Numbers are `Decimal`, so that comparisons are exact. Does not
score; `rewards.py` does.
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
    """Return the number on the line of the last `####`, or None.

    Currency signs, thousands separators, units, emphasis and a final period are ignored. A line with two
    numbers ("5 + 3 = 8", "3/4", "12,13") has no answer: a reward for one of several numbers would teach the
    model to list candidates.
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
