"""What a user's command of a rollout server becomes."""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from grpo_run.runtime.errors import ConfigError
from grpo_run.runtime.features.rollout_server._process import (
    ServerCommand,
    command_of,
    last_lines,
    visible_gpus,
)

ENVIRONMENT = {"PATH": "/usr/bin:/bin"}


def made(text: str, environment: dict[str, str] | None = None, **named: Any) -> ServerCommand:
    """What is started, for one rank on a machine without GPUs."""
    return command_of(text, {**ENVIRONMENT, **(environment or {})}, **{"ranks": 1, "gpus": [], **named})


def test_host_port_and_development_routes_are_added() -> None:
    """TRL sends weights through them; nobody else shall reach them."""
    command = made("env serve --model M")
    assert command.words == (
        "env",
        "serve",
        "--model",
        "M",
        "--port",
        str(command.port),
        "--host",
        "127.0.0.1",
    )
    assert command.base_url == f"http://127.0.0.1:{command.port}"
    assert command.environment == {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}


@pytest.mark.parametrize("text", ["env --port 8123 --host ::", "env --port=8123 --host=::"])
def test_what_the_user_says_stays(text: str) -> None:
    """However it is written."""
    command = made(f"VLLM_SERVER_DEV_MODE=0 {text}")
    assert command.words == tuple(text.split())
    assert command.port == 8123
    assert command.environment["VLLM_SERVER_DEV_MODE"] == "0"


@pytest.mark.parametrize(
    ("host", "reached"),
    [
        ("0.0.0.0", "127.0.0.1"), ("::", "127.0.0.1"), ("localhost", "127.0.0.1"),
        ("127.0.0.2", "127.0.0.2"), ("::1", "[::1]"),
    ],
)  # fmt: skip
def test_a_server_is_asked_where_it_listens(host: str, reached: str) -> None:
    """At a single address of the machine it does not listen at the others."""
    assert made(f"env --port 8123 --host {host}").base_url == f"http://{reached}:8123"


def test_two_commands_get_two_ports() -> None:
    """Two runs on one machine work."""
    assert made("env").port != made("env").port


def test_the_server_gets_the_gpus_that_the_ranks_leave() -> None:
    """Unless the user says which."""
    eight = [str(number) for number in range(8)]
    assert made("env", ranks=7, gpus=eight).environment["CUDA_VISIBLE_DEVICES"] == "7"
    assert made("env", ranks=6, gpus=eight).environment["CUDA_VISIBLE_DEVICES"] == "6,7"
    assert made("CUDA_VISIBLE_DEVICES=0 env", ranks=7, gpus=eight).environment["CUDA_VISIBLE_DEVICES"] == "0"


def test_the_gpus_of_a_run_are_those_of_its_environment() -> None:
    """In their order."""
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "3, 1,GPU-7f"}) == ["3", "1", "GPU-7f"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}) == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("A=1", "--rollout-server 'A=1' names no program"),
        (
            "no-such-program serve",
            "--rollout-server: no-such-program is not a program that can be found on PATH",
        ),
        ("env --port many", "--rollout-server: --port many is no number from 1 to 65535"),
        ("env --port 99999", "--rollout-server: --port 99999 is no number from 1 to 65535"),
        ("env --port 0", "--rollout-server: --port 0 is no number from 1 to 65535"),
    ],
)
def test_a_wrong_command_gets_one_line(text: str, said: str) -> None:
    """Before anything is started."""
    with pytest.raises(ConfigError, match="^" + said.replace("'", ".")):
        made(text)


def test_a_port_at_which_another_program_listens_is_refused() -> None:
    """The server of another run would be taken for this run's, and be sent its weights."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"^--rollout-server: at --port {port} another program listens"):
            made(f"env --port {port}")
    assert made(f"env --port {port}").port == port


def test_the_last_lines_of_a_log_are_text(tmp_path: Path) -> None:
    """vLLM colours the names of its processes; a bar of progress ends with a carriage return."""
    log = tmp_path / "log"
    log.write_bytes(b"one\n\x1b[0;36m(Engine pid=7)\x1b[0;0m loads\r 50%\r100% \n\x1b[2J\x07done \xff\n\n")
    assert last_lines(log, 3) == ["50%", "100%", "done \ufffd"]
    assert last_lines(log, 9)[:2] == ["one", "(Engine pid=7) loads"]
    assert last_lines(tmp_path / "none", 3) == []


def test_a_program_may_be_a_path() -> None:
    """With words that the shell would split."""
    assert made(f"{sys.executable} -c 'print(1)'").words[:3] == (sys.executable, "-c", "print(1)")


def test_ranks_that_use_all_gpus_leave_none_to_a_server() -> None:
    """The user says which one both use."""
    with pytest.raises(ConfigError, match="the ranks use all 2 GPUs of this node"):
        made("env", ranks=2, gpus=["0", "1"])
    assert (
        made("CUDA_VISIBLE_DEVICES=1 env", ranks=2, gpus=["0", "1"]).environment["CUDA_VISIBLE_DEVICES"]
        == "1"
    )
