"""Collectives are parsed from Flight Recorders and merged with the collective log."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from typing import Any

import pytest
from support.transcripts import Story, stories

from grpo_run.watchdog.deadlocks.collectives import (
    Collective,
    CollectiveProgress,
    dtype_name,
    operation_name,
    python_dtype_name,
    size_bytes,
)
from grpo_run.watchdog.deadlocks.recording import group_positions, join_recordings, merge, parse_recording
from grpo_run.watchdog.verdict import Location

LINE = Location(file="/home/user/train.py", line=88, function="reward")


def gloo_entry(**changes: Any) -> dict[str, Any]:
    """An all-reduce on the default group as torch 2.13 writes it for Gloo, pending."""
    return {
        "collective_seq_id": 8, "input_dtypes": ["Float"], "input_sizes": [[7]], "is_p2p": False, "op_id": 8,
        "output_dtypes": ["Float"], "output_sizes": [[7]], "p2p_seq_id": 0, "pg_id": 0,
        "process_group": ["0", "default_pg"], "profiling_name": "gloo:all_reduce", "record_id": 8,
        "retired": False, "state": "scheduled", "thread_id": "140387276528512", "thread_name": "python3",
        "time_created_ns": 1795238780661789801, "time_discovered_completed_ns": 0,
        "time_discovered_started_ns": 0, "timeout_ms": 1800000,
    } | changes  # fmt: skip


def recording(*entries: dict[str, Any], **changes: Any) -> str:
    """The handler's whole answer, with Gloo's group configuration."""
    answer = {
        "comm_lib_version": "", "entries": list(entries), "nccl_comm_state": {},
        "pg_config": {"": {"desc": "", "name": "", "ranks": "[]"}},
        "pg_status": {"0": {"last_completed_collective": "7", "last_enqueued_collective": "8",
                            "last_started_collective": "-1"}},
        "version": "2.10",
    }  # fmt: skip
    return json.dumps(answer | changes)


def collective(sequence: int = 1, operation: str = "all_reduce", **changes: Any) -> Collective:
    """A pending all-reduce of seven floats on the default group."""
    made: dict[str, Any] = {
        "group": "0", "sequence": sequence, "operation": operation, "sizes": ((7,),), "dtypes": ("Float",),
        "progress": CollectiveProgress.enqueued,
    }  # fmt: skip
    return Collective(**(made | changes))


class RecordingShell:
    """A rank whose recorders and whose log are empty."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self.config: dict[str, Any] = {}
        self.entries: list[dict[str, Any]] = []
        self.answers: list[bytes] = []
        self.from_recorder: list[Collective] = []
        self.from_log: list[Collective] = []

    def group(self, name: str, ranks: str) -> None:
        """The members of a group, as a recorder has them."""
        self.config[name] = {"name": name, "desc": "", "ranks": ranks}

    def add(self, **changes: str) -> None:
        """A recorder has an entry; `null` leaves out a field."""
        entry = gloo_entry(**{name: json.loads(value) for name, value in changes.items()})
        self.entries.append({name: value for name, value in entry.items() if value is not None})

    def next(self) -> None:
        """What follows is in another recorder."""
        self.answers.append(recording(*self.entries, pg_config=self.config).encode())
        self.entries, self.config = [], {}

    def read(self) -> str:
        """What the recorders hold."""
        self.next()
        answer = self.answers[0] if len(self.answers) == 1 else join_recordings(*self.answers)
        self._begin()
        return parsed(answer)

    def entry(self, **changes: str) -> str:
        """What a recorder with this entry holds."""
        self.entries = []
        self.add(**changes)
        return parsed(recording(*self.entries, pg_config=self.config))

    def text(self, answer: str) -> str:
        """What a recorder that answers with this text holds."""
        return parsed(answer.encode("latin-1"))

    def joined(self, answer: str) -> str:
        """What two recorders hold of which the other answers with this text."""
        try:
            return parsed(join_recordings(recording(gloo_entry()).encode(), answer.encode()))
        except ValueError as error:
            return str(error)

    def names(self, *raws: str) -> str:
        """The names of operations."""
        return " ".join(dict.fromkeys(operation_name(raw) or "-" for raw in raws))

    def types(self, *raws: str) -> str:
        """The names of types."""
        return " ".join(map(dtype_name, raws))

    def size(self, sizes: str, *dtypes: str) -> str:
        """The bytes of inputs of these sizes and types."""
        shapes = tuple(tuple(shape) for shape in json.loads(sizes))
        return str(size_bytes(collective(sizes=shapes, dtypes=dtypes)))

    def recorded(self, sequence: str, *words: str, **changes: str) -> None:
        """A recorder has a collective."""
        self.from_recorder.append(collective_of(sequence, words, changes))

    def noted(self, sequence: str, *words: str, **changes: str) -> None:
        """The log has one."""
        self.from_log.append(collective_of(sequence, words, changes))

    def merge(self) -> str:
        """Both together."""
        found = merge(self.from_recorder, self.from_log)
        self._begin()
        return "\n".join(map(described, found))

    def positions(self) -> str:
        """The last numbers of each group."""
        return str(group_positions(self.from_recorder))


def collective_of(sequence: str, words: tuple[str, ...], changes: dict[str, str]) -> Collective:
    """A collective of a story; `bare` has neither sizes nor types."""
    made: dict[str, Any] = {"sizes": (), "dtypes": ()} if "bare" in words else {}
    for name, value in changes.items():
        if name == "line":
            made["location"] = LINE
        elif name == "progress":
            made[name] = CollectiveProgress[value]
        elif name == "members":
            made[name] = tuple(map(int, value.split(",")))
        elif name in ("thread", "group"):
            made[name] = value
        else:
            made[name] = float(value) if name == "timeout_seconds" else value == "yes" or int(value)
    operation = next((word for word in words if word != "bare"), "all_reduce")
    return collective(int(sequence), operation, **made)


def parsed(answer: str | bytes) -> str:
    """What is read from an answer, or the error, which is one line."""
    try:
        return "\n".join(map(described, parse_recording(answer))) or "nothing"
    except ValueError as error:
        return repr(str(error))


def described(one: Collective) -> str:
    """A collective with the fields that differ from those of a usual one."""
    usual = collective(one.sequence, one.operation, group=one.group, progress=one.progress)
    shown = {
        field.name: getattr(one, field.name)
        for field in fields(one)
        if getattr(one, field.name) != getattr(usual, field.name)
    }
    if one.location is not None:
        shown["location"] = one.location.line
    others = [f"{name} {value}" for name, value in shown.items()]
    return ", ".join([f"{one.operation} #{one.sequence} of {one.group} {one.progress.name}", *others])


@stories(__file__, "recordings.txt")
def test_recordings(story: Story, word: str) -> None:
    """Every story of the file."""
    story.check(RecordingShell(), word)


def test_an_answer_without_entries_holds_no_collectives() -> None:
    """torch leaves the list out while nothing has been recorded."""
    answer = '{"comm_lib_version":"","nccl_comm_state":{},"pg_config":{},"pg_status":{},"version":"2.10"}'
    assert parse_recording(answer) == ()
    gloo, empty = recording(gloo_entry()).encode(), b'{"pg_config": {}, "version": "2.10"}'
    assert join_recordings(gloo, empty) == gloo
    nccl = recording(gloo_entry(profiling_name="nccl:all_reduce")).encode()
    (read,) = parse_recording(join_recordings(empty, nccl))
    assert read.on_device


@pytest.mark.parametrize(
    "dtype",
    [
        "Double", "Float", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool", "ComplexFloat",
        "ComplexDouble", "Float8_e4m3fn", "Float8_e5m2",
    ],
)  # fmt: skip
def test_the_size_of_an_element_is_in_the_name_of_its_type(dtype: str) -> None:
    """`float32` has 32 bits; a bool has a byte."""
    bits = re.search(r"\d+", python_dtype_name(dtype))
    assert size_bytes(collective(sizes=((5,),), dtypes=(dtype,))) == 5 * (int(bits[0]) // 8 if bits else 1)
