"""The address of the run's server in configurations, and what is written of the server that is used."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_run.runtime.features.rollout_server.rank import (
    RolloutServerPart,
    address_of,
    leave_proxies_out,
    set_address,
    uses_server,
)
from grpo_run.runtime.features.rollout_server.settings import NAME, RankServer
from grpo_run.runtime.rank.points import CallPoints
from grpo_run.watchdog.observation import Phase

SERVER = RankServer(base_url="http://127.0.0.1:41231")


@dataclass
class Arguments:
    """`transformers.TrainingArguments`."""

    output_dir: str = ""

    def __post_init__(self) -> None:
        self.validated = True


@dataclass
class GRPO(Arguments):
    """TRL's configuration of GRPO."""

    use_vllm: bool = True
    vllm_mode: str = "server"
    vllm_server_base_url: str | None = None
    vllm_server_host: str = "0.0.0.0"
    vllm_server_port: int = 8000
    vllm_server_timeout: float = 240.0
    vllm_group_port: int = 51216

    def __post_init__(self) -> None:
        super().__post_init__()
        self.used = self.vllm_server_base_url


@dataclass
class AsyncGRPO(Arguments):
    """TRL's configuration of AsyncGRPO."""

    vllm_server_base_url: str = "http://localhost:8000"
    vllm_server_timeout: float = 240.0


@pytest.fixture
def part(session: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., RolloutServerPart]:
    """Return the feature in a rank, which has been told of a server or not."""
    monkeypatch.setattr(Arguments, "__post_init__", Arguments.__post_init__)

    def make(server: RankServer | None) -> RolloutServerPart:
        told = {} if server is None else {NAME: server.model_dump(mode="json")}
        session.settings = session.settings.model_copy(update={"features": told})
        made = RolloutServerPart()
        made._address(session, server, SimpleNamespace(TrainingArguments=Arguments))
        return made

    return make


def test_a_configuration_names_the_runs_server(part: Callable[..., Any], session: Any) -> None:
    """Before TRL reads it. TRL waits as long as the server may take to start."""
    part(SERVER)
    made = GRPO()
    assert (made.used, made.validated) == (SERVER.base_url, True)
    assert made.vllm_server_timeout == 1800.0
    assert AsyncGRPO().vllm_server_base_url == SERVER.base_url
    assert session.notified == []


def test_two_configurations_get_two_ports_for_weights(part: Callable[..., Any]) -> None:
    """The trainer of the first one still holds its own. What the script gives may be taken by another run."""
    part(SERVER)
    first = GRPO(vllm_group_port=51216).vllm_group_port
    with socket.create_server(("127.0.0.1", first)):  # raises if it is not free
        second = GRPO(vllm_group_port=51300).vllm_group_port
    assert len({first, second, 51216, 51300}) == 4


@pytest.mark.parametrize(
    ("made", "named"),
    [
        (lambda: GRPO(vllm_server_base_url="http://gpu7:8000/"), "http://gpu7:8000"),
        (lambda: GRPO(vllm_server_port=8001), "http://0.0.0.0:8001"),
        (lambda: AsyncGRPO(vllm_server_base_url="http://gpu7:9"), "http://gpu7:9"),
    ],
)
def test_a_script_that_names_another_server_is_told_so_once(
    part: Callable[..., Any], session: Any, made: Callable[[], Any], named: str
) -> None:
    """In one line."""
    part(SERVER)
    assert made().vllm_server_base_url == made().vllm_server_base_url == SERVER.base_url
    assert session.notified == [
        f"--rollout-server: the script names {named}; {SERVER.base_url} is used instead"
    ]


@pytest.mark.parametrize("settings", [{"use_vllm": False}, {"vllm_mode": "colocate"}])
def test_configurations_without_a_server_stay(
    part: Callable[..., Any], session: Any, settings: dict[str, Any]
) -> None:
    """And the user is told that the server is not used."""
    made = part(SERVER)
    arguments = GRPO(**settings)
    assert (arguments.vllm_server_base_url, uses_server(arguments)) == (None, False)
    made.check_trainer(session, SimpleNamespace(args=arguments))
    assert session.notified == ["--rollout-server: SimpleNamespace does not generate with a server"]


def test_without_a_server_of_the_run_the_scripts_own_is_limited(part: Callable[..., Any]) -> None:
    """Requests to it get time limits; its address stays."""
    made = part(None)
    arguments = GRPO(vllm_server_port=8001)
    assert (arguments.vllm_server_base_url, made._limits.servers) == (None, {"http://0.0.0.0:8001"})
    assert arguments.vllm_server_timeout == 240.0


def test_a_changed_configuration_keeps_its_longer_time() -> None:
    """The script may wait longer than the run."""
    arguments = GRPO(vllm_server_timeout=7200.0)
    assert set_address(arguments, SERVER, 1800.0) == ""
    assert (arguments.vllm_server_timeout, address_of(arguments)) == (7200.0, SERVER.base_url)


@pytest.mark.parametrize(
    ("upper", "lower", "expected"),
    [
        ("", "", ("127.0.0.1,localhost", "127.0.0.1,localhost")),
        ("a.org,localhost", "", ("a.org,localhost,127.0.0.1", "a.org,localhost,127.0.0.1")),
        ("a.org", "b.org", ("a.org,127.0.0.1,localhost", "b.org,127.0.0.1,localhost")),
        ("*", "", ("*", "*")),
    ],
)
def test_no_proxy_stands_before_this_machine(
    upper: str, lower: str, expected: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the user has listed stays, for programs that read one of the two variables, too."""
    monkeypatch.setenv("NO_PROXY", upper)
    monkeypatch.setenv("no_proxy", lower)
    leave_proxies_out(SERVER.base_url)
    leave_proxies_out(SERVER.base_url)
    assert (os.environ["NO_PROXY"], os.environ["no_proxy"]) == expected


def test_no_proxy_stands_before_a_server_at_another_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of this machine."""
    monkeypatch.setenv("no_proxy", "")
    monkeypatch.setenv("NO_PROXY", "")
    leave_proxies_out("http://10.0.0.5:8000")
    assert os.environ["no_proxy"] == "127.0.0.1,localhost,10.0.0.5"


@pytest.fixture
def hooks() -> Iterator[ExitStack]:
    """What ends with a call."""
    with ExitStack() as stack:
        yield stack


@pytest.mark.parametrize("server", [SERVER, None])
def test_the_server_that_is_used_is_in_the_journal(
    part: Callable[..., Any], session: Any, hooks: ExitStack, events: Any, server: RankServer | None
) -> None:
    """Also one that the run has not started."""
    made = part(server)
    trainer = SimpleNamespace(args=AsyncGRPO(vllm_server_base_url="http://gpu7:9"))
    made.call(session, CallPoints(train_call=1, trainer=trainer, hooks=hooks))
    (used,) = [one for one in events() if one["event"] == "rollout_server_used"]
    expected = (SERVER.base_url, True) if server else ("http://gpu7:9", False)
    assert (used["base_url"], used["started_by_run"]) == expected


def test_sending_weights_is_a_phase(
    part: Callable[..., Any], session: Any, hooks: ExitStack, slot: Any
) -> None:
    """To an engine in the rank, and by AsyncGRPO, on every rank."""
    seen: list[Phase] = []

    class Sender:
        """What has methods that send."""

        def sync_weights(self) -> None:
            seen.append(slot.running)

        _sync_weight_merged = _sync_weight_lora = sync_weights

    made, session.is_main = part(None), False
    trainer: Any = Sender()
    trainer.args, trainer.vllm_generation = GRPO(vllm_mode="colocate"), Sender()
    made.call(session, CallPoints(train_call=1, trainer=trainer, hooks=hooks))
    trainer.vllm_generation.sync_weights()
    trainer._sync_weight_merged()
    trainer._sync_weight_lora()
    assert seen == [Phase.weight_sync] * 3
    assert slot.running is not Phase.weight_sync
