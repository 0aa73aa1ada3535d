"""One rank's call of a consensus function, and its encoding as integers for the exchange.

Made by `functions.py`, sent by `exchange.py`, compared by `agreement.py`. Pure.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from types import CodeType

FUNCTIONS = ("any", "all", "while_any")
_MAGIC = int.from_bytes(b"grpo-c1", "big")
"""Second number of every call. On a group that the script uses too, another collective may take a call's place."""
_NUMBER_BYTES = 7
"""Bytes of text in one number: fewer than 8, so that no number is negative."""
_LIMIT = 1 << 8 * _NUMBER_BYTES
_FILE_BYTES = 126
_CALLER_BYTES = 49
_HEADER = 6
CALL_NUMBERS = _HEADER + (_FILE_BYTES + _CALLER_BYTES) // _NUMBER_BYTES
"""How many numbers a call is sent as."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CallSite:
    """A source line that calls a consensus function.

    `function` is one of `FUNCTIONS`; `caller` is the function of the script that the line is in. A longer `file` loses
    its beginning when it is sent, and a longer `caller` its end.
    """

    function: str
    file: str
    line: int
    caller: str

    @staticmethod
    def of(function: str, code: CodeType, line: int) -> CallSite:
        """Return the site of a line of a code object."""
        return _site(function, code.co_filename, line, code.co_name)

    @property
    def file_name(self) -> str:
        """The file without its folders, which may differ between nodes."""
        return self.file.replace("\\", "/").rpartition("/")[2]

    @property
    def text(self) -> str:
        """`consensus.any at train.py:12 in main`, for messages."""
        return f"consensus.{self.function} at {self.file_name}:{self.line} in {self.caller}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One call: where it is, what this rank contributes, and how often it has called.

    `ordinal` counts the rank's calls from 1, over all sites. `iteration` counts the calls of one `while_any` loop from
    1; 0 for other functions.
    """

    site: CallSite
    flag: bool
    ordinal: int
    iteration: int = 0

    @property
    def place(self) -> tuple[str, str, int, str, int]:
        """What must be equal on all ranks."""
        site = self.site
        return site.function, site.file_name, site.line, site.caller, self.iteration

    def encode(self) -> list[int]:
        """Return the call as `CALL_NUMBERS` numbers from 0 to 2**56; the first one is the flag."""
        return [int(self.flag), _MAGIC, self.ordinal, self.iteration, *_encoded(self.site)]

    @staticmethod
    def decode(numbers: Sequence[int]) -> Call | None:
        """Return the call that was sent as `numbers`; None if they are not a call."""
        if (
            len(numbers) != CALL_NUMBERS
            or numbers[1] != _MAGIC
            or not 0 <= min(numbers) <= max(numbers) < _LIMIT
        ):
            return None
        flag, _, ordinal, iteration, function, line, *text = numbers
        if function >= len(FUNCTIONS):
            return None
        raw = b"".join(number.to_bytes(_NUMBER_BYTES, "big") for number in text)
        site = CallSite(
            function=FUNCTIONS[function],
            file=_text(raw[:_FILE_BYTES]),
            line=line,
            caller=_text(raw[_FILE_BYTES:]),
        )
        return Call(site=site, flag=bool(flag), ordinal=ordinal, iteration=iteration)


@functools.lru_cache(maxsize=1024)
def _site(function: str, file: str, line: int, caller: str) -> CallSite:
    return CallSite(function=function, file=file, line=line, caller=caller)


@functools.lru_cache(maxsize=1024)
def _encoded(site: CallSite) -> tuple[int, ...]:
    """The part of a call that is the same for every call of its line, encoded once."""
    file = site.file.encode(errors="replace")[-_FILE_BYTES:].ljust(_FILE_BYTES, b"\0")
    caller = site.caller.encode(errors="replace")[:_CALLER_BYTES].ljust(_CALLER_BYTES, b"\0")
    raw = file + caller
    numbers = [
        int.from_bytes(raw[at : at + _NUMBER_BYTES], "big") for at in range(0, len(raw), _NUMBER_BYTES)
    ]
    return FUNCTIONS.index(site.function), site.line, *numbers


def _text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode(errors="replace")
