"""Collective decisions of scripts: encode each rank's call, exchange the calls, and combine them.

`trainers/consensus.py` makes a `ConsensusCall`, sends it with `exchange`, and combines all calls with
`agree`: one answer, or an error that names the line of each rank. `agree` is pure: every rank is given the
same calls, so every rank returns the same answer or raises the same error.

Under `grpo-run launch` the first call connects a vote group of its own (`vote.py`), so that the calls mix
neither with the step vote nor with collectives of the script. Elsewhere, for example under torchrun, the
exchange is an `all_gather` on torch's default group.
"""

from __future__ import annotations

import builtins
import functools
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import CodeType
from typing import TYPE_CHECKING, Any

from grpo_run.runtime.errors import ConsensusError, UsageError
from grpo_run.runtime.rank.session import Session, current, is_forked_from_rank
from grpo_run.watchdog.deadlocks.collectives import CONSENSUS_GROUP
from grpo_run.watchdog.observation import Phase
from grpo_run.watchdog.text import rank_names

if TYPE_CHECKING:
    from grpo_run.runtime.rank.vote import VoteGroup


FUNCTIONS = ("any", "all", "while_any")
_MAGIC = int.from_bytes(b"grpo-c1", "big")
"""Second number of every call. On a group that the script uses too, another collective may take a call's
place.
"""
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

    `function` is one of `FUNCTIONS`; `caller` is the function of the script that the line is in. A longer
    `file` loses its beginning when it is sent, and a longer `caller` its end.
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
class ConsensusCall:
    """One call: where it is, what this rank contributes, and how often it has called.

    `ordinal` counts the rank's calls from 1, over all sites. `iteration` counts the calls of one `while_any`
    loop from 1; 0 for other functions.
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
    def decode(numbers: Sequence[int]) -> ConsensusCall | None:
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
        return ConsensusCall(site=site, flag=bool(flag), ordinal=ordinal, iteration=iteration)


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


MAX_PLACES = 4
"""Places that an error lists; the ranks of further ones are only counted."""


def agree(own: ConsensusCall, answers: Sequence[Sequence[int]]) -> bool:
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


def _compare(own: ConsensusCall, answers: Sequence[Sequence[int]]) -> None:
    """Raise if the calls differ in more than the number of calls so far."""
    places: dict[object, tuple[ConsensusCall | None, list[int]]] = {}
    for rank, answer in enumerate(answers):
        call = ConsensusCall.decode(answer)
        places.setdefault(call.place if call else None, (call, []))[1].append(rank)
    if len(places) == 1 and None not in places:
        return
    if list(places) == [None]:
        raise ConsensusError(
            f"what ranks sent in {own.site.text} is no call, on this rank either: the process group mixes up"
            " its collectives"
        )
    raise ConsensusError(describe(list(places.values())))


def describe(places: Sequence[tuple[ConsensusCall | None, Sequence[int]]]) -> str:
    """Describe which ranks are at which call; the first line is short enough for a report.

    Args:
        places: the different calls and the ranks that are there; no call for a rank that is in another
            collective.
    """
    calls = [call for call, _ in places if call is not None]
    several = len({call.site for call in calls}) < len(calls)  # iterations of loops at one line
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
            (
                "Every rank must make the same calls of consensus functions, at the same lines and equally"
                " often."
            ),
            *lines,
        ]
    )


IN_STEPS = frozenset({Phase.data, Phase.generate, Phase.forward_backward})
"""Phases in which a script's own loop of `while_any` generates."""


class Turns:
    """Shows on the board what this rank does in a loop of `while_any` inside a step: it generates while it
    has something left to do, and waits for the others afterwards. A script's loop elsewhere is not shown.
    """

    def __init__(self) -> None:
        session = current()
        slot = session.slot if session is not None else None
        self._slot = slot if slot is not None and slot.running in IN_STEPS else None
        self._opened = self._slot is not None and self._slot.running is not Phase.generate
        if self._slot is not None and self._opened:
            self._slot.enter(Phase.generate)
        self._waits = False

    def show(self, more: bool) -> None:
        """Show what the next turn is for this rank.

        Args:
            more: it has something left to do.
        """
        if self._slot is None or self._waits is not more:
            return
        self._waits = not more
        if more:
            self._slot.leave(Phase.vote)
        else:
            self._slot.enter(Phase.vote)

    def end(self) -> None:
        """The loop is over."""
        self.show(True)
        if self._slot is not None and self._opened:
            self._slot.leave(Phase.generate)


_groups: dict[Session, VoteGroup] = {}


def exchange(call: ConsensusCall) -> list[list[int]] | None:
    """Send this rank's call and return every rank's, in the order of the ranks; None with one rank.
    Collective.

    Raises:
        UsageError: no process group connects the ranks.
    """
    session = current()
    if session is not None:
        if session.world_size == 1:
            return None
        if session not in _groups:
            _groups[session] = session.connect_vote_group(CONSENSUS_GROUP)
        return _groups[session].gather(call.encode())
    if is_forked_from_rank():
        raise UsageError(
            f"{call.site.text} was called in a process that a rank has forked: call it in the rank itself"
        )
    return _gather_on_default_group(call)


def _gather_on_default_group(call: ConsensusCall) -> list[list[int]] | None:
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise UsageError(
                f"{call.site.text} was called before the ranks were connected (WORLD_SIZE is"
                f" {os.environ['WORLD_SIZE']}): call torch.distributed.init_process_group first, or start the"
                " script with grpo-run launch"
            )
        return None
    ranks = distributed.get_world_size()
    if ranks == 1:
        return None
    import torch

    own = torch.tensor(call.encode(), dtype=torch.int64, device=_device(distributed.get_backend_config()))
    gathered = [torch.empty_like(own) for _ in range(ranks)]
    distributed.all_gather(gathered, own)
    return [tensor.tolist() for tensor in gathered]


def _device(backends: str) -> str:
    """Return the kind of device on which the default group communicates; the CPU if it can.

    Args:
        backends: torch's configuration of the group: `cpu:gloo,cuda:nccl`.
    """
    kinds = [part.partition(":")[0] for part in backends.split(",")]
    return "cpu" if "cpu" in kinds else kinds[0]
