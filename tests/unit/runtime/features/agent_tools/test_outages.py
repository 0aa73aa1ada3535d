"""Which exceptions are failures of the infrastructure: by their names, and by what they were raised from."""

from __future__ import annotations

import asyncio
import socket
import urllib.error
from collections.abc import Callable
from typing import Any

import pytest

from grpo_run.runtime.errors import ConfigError
from grpo_run.runtime.features.agent_tools._outages import (
    DEFAULT_NAMES,
    CallEndedError,
    OtherAnswerError,
    is_outage,
    names_of,
    parse_names,
)


class SandboxError(Exception):
    """Of a client, which wraps what the system says."""


def wrapped() -> None:
    try:
        raise ConnectionRefusedError(111, "refused")
    except OSError as error:
        raise SandboxError("no sandbox") from error


def in_a_handler() -> None:
    try:
        raise socket.gaierror(-2, "name not known")
    except OSError:
        raise SandboxError("no sandbox")  # noqa: B904 - as clients do


def meant() -> None:
    try:
        raise ConnectionResetError
    except OSError:
        raise SandboxError("the model's program closed the connection") from None


def away() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        socket.create_connection(unused.getsockname(), timeout=5).close()


def late() -> None:
    async def wait() -> None:
        await asyncio.wait_for(asyncio.sleep(9), 0.01)

    asyncio.run(wait())


def no_file() -> None:
    open("/no/such/file").close()


def not_found() -> None:
    raise urllib.error.HTTPError("http://localhost/page", 404, "not found", {}, None)  # type: ignore[arg-type]


def error_of(function: Callable[[], Any]) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - any
        function()
    return caught.value  # type: ignore[no-any-return]


@pytest.mark.parametrize("function", [wrapped, in_a_handler, away, late])
def test_what_is_away_or_late_is_an_outage(function: Callable[[], None]) -> None:
    """Also wrapped in an exception of a client."""
    assert is_outage(error_of(function), DEFAULT_NAMES)
    assert not is_outage(error_of(function), ())


@pytest.mark.parametrize("function", [meant, no_file, not_found, lambda: 1 / 0, lambda: {}["key"]])
def test_what_the_tool_means_is_none(function: Callable[[], None]) -> None:
    """TRL shows it to the model."""
    assert not is_outage(error_of(function), DEFAULT_NAMES)


def test_the_user_names_further_ones() -> None:
    """By the class, with or without its module."""
    assert is_outage(error_of(meant), ["SandboxError"])
    assert is_outage(error_of(meant), [f"{__name__}.SandboxError"])
    assert is_outage(CallEndedError(2.0, "interrupted"), ())
    assert is_outage(OtherAnswerError("other"), ())


def test_exceptions_that_were_raised_from_one_another_end() -> None:
    """A circle is possible."""
    one, other = KeyError("one"), ValueError("other")
    one.__cause__, other.__cause__ = other, one
    assert {"KeyError", "ValueError", "builtins.LookupError"} <= names_of(one)


def test_names_are_parsed() -> None:
    """A name that cannot be one is refused."""
    assert parse_names("ConnectionError, e2b.SandboxException") == ("ConnectionError", "e2b.SandboxException")
    assert parse_names("none") == ()
    for wrong in ("", "Connection Error", "A,,B", "404"):
        with pytest.raises(ConfigError, match="--infrastructure-errors"):
            parse_names(wrong)
