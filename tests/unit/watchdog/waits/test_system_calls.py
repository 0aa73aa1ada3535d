"""What a thread waits for, from the kernel's line about its system call."""

from __future__ import annotations

import struct
from collections.abc import Mapping

import pytest

from grpo_run.watchdog.waits.looks import Wait, WaitKind
from grpo_run.watchdog.waits.system_calls import decode_wait, parse_system_call

STACK = "0x7ffe97b3a3b8 0x7f3c5fd0f117"
AT = 0x7F0000001000


def wait(
    number: int, *arguments: int, machine: str = "x86_64", memory: Mapping[int, bytes] | None = None
) -> Wait | None:
    """Decode one call; memory is by address."""
    padded = [*arguments, *[0] * (6 - len(arguments))]
    line = f"{number} {' '.join(hex(value & (1 << 64) - 1) for value in padded)} {STACK}"
    call = parse_system_call(line, machine)
    if call is None:
        return None

    def read_memory(address: int, size_bytes: int) -> bytes | None:
        content = (memory or {}).get(address)
        return content[:size_bytes] if content is not None and len(content) >= size_bytes else None

    return decode_wait(call, read_memory)


@pytest.mark.parametrize(
    "line", ["running", "-1 0x7ffe97b3a3b8 0x7f3c5fd0f117", "", "999 0x0 0x0 0x0 0x0 0x0 0x0 " + STACK]
)
def test_a_thread_that_runs_or_is_in_another_call_is_not_decoded(line: str) -> None:
    """It may do anything."""
    assert parse_system_call(line, "x86_64") is None


def test_another_machine_or_a_process_of_32_bits_is_not_decoded() -> None:
    """Their numbers mean other calls."""
    line = "202 0x7f00 0x80 0x0 0x0 0x0 0x0"
    assert parse_system_call(f"{line} {STACK}", "x86_64") is not None
    assert parse_system_call(f"{line} {STACK}", "riscv64") is None
    assert parse_system_call(f"{line} 0xffe9a3b8 0xf7f0f117", "x86_64") is None


@pytest.mark.parametrize(
    ("operation", "timeout", "kind"),
    [
        (128, 0, WaitKind.futex),
        (128 | 9 | 256, 0, WaitKind.futex),
        (128, AT, WaitKind.timed),
        (128 | 9, AT, WaitKind.timed),
        (0, 0, WaitKind.unknown),  # shared: another process may wake it
        (9, 0, WaitKind.unknown),
        (128 | 6, 0, WaitKind.unknown),  # FUTEX_LOCK_PI
        (128 | 11, 0, WaitKind.unknown),
    ],
)
def test_only_a_private_futex_without_a_time_limit_depends_on_its_process_alone(
    operation: int, timeout: int, kind: WaitKind
) -> None:
    """On both machines."""
    for number, machine in ((202, "x86_64"), (98, "aarch64")):
        found = wait(number, AT, operation, 0, timeout, machine=machine)
        assert found is not None
        assert found.kind is kind


def test_only_an_absolute_sleep_on_the_monotonic_clock_has_a_known_end() -> None:
    """A relative one does not show when it began, and the wall clock may be set."""
    memory = {AT: struct.pack("<qq", 1234, 500_000_000)}
    sleep = wait(230, 1, 1, AT, memory=memory)
    assert sleep is not None
    assert (sleep.kind, sleep.until_seconds) == (WaitKind.sleep, 1234.5)
    for arguments in ((1, 0, AT), (0, 1, AT), (7, 1, AT), (1, 1, AT + 8)):
        other = wait(230, *arguments, memory=memory)
        assert other is not None
        assert other.kind is WaitKind.unknown


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((7, AT, 1, 5000), Wait(kind=WaitKind.timed, call="poll", timeout_seconds=5.0)),
        ((232, 4, AT, 8, 10), Wait(kind=WaitKind.timed, call="epoll_wait", timeout_seconds=0.01)),
        ((281, 4, AT, 8, 0), Wait(kind=WaitKind.timed, call="epoll_pwait", timeout_seconds=0.0)),
        ((7, AT, 1, -1), Wait(kind=WaitKind.descriptors, call="poll")),
        ((232, 4, AT, 8, -1), Wait(kind=WaitKind.descriptors, call="epoll_wait")),
        ((61, 321), Wait(kind=WaitKind.child, call="wait4", child=321)),
        ((61, -1), Wait(kind=WaitKind.child, call="wait4", child=0)),
        ((247, 1, 321), Wait(kind=WaitKind.child, call="waitid", child=321)),
        ((247, 3, 321), Wait(kind=WaitKind.child, call="waitid", child=0)),
        ((288, 4), Wait(kind=WaitKind.accept, call="accept4")),
        ((0, 4, AT, 1), None),  # read
        ((35, AT, 0), None),  # nanosleep
    ],
)
def test_other_calls(arguments: tuple[int, ...], expected: Wait | None) -> None:
    """Idle threads of libraries are recognized by the time limit of a poll; a child by its id."""
    assert wait(*arguments) == expected
