"""In a rehearsal, nobody sends weights to a server that the run has not started: neither TRL nor a script."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_run.runtime.errors import ConfigError
from grpo_run.runtime.features.rollout_server.rank import check_clients
from grpo_run.runtime.launch.rehearsal import Rehearsal

OWN, FREE, OTHER = "http://127.0.0.1:1", "http://free:2", "http://other:3"


def client(tmp_path: Path, address: str) -> Any:
    """Make a client with the names of TRL's in a rehearsal."""

    class VLLMClient:
        def __init__(self, base_url: str) -> None:
            self.base_url = base_url

        def init_communicator(self, device: str) -> str:
            return f"{device} has joined"

        def chat(self) -> str:
            return "answer"

    rehearsal = Rehearsal(folder=tmp_path, facts=tmp_path / "facts", free_server=FREE)
    check_clients(rehearsal, OWN, SimpleNamespace(VLLMClient=VLLMClient))
    return VLLMClient(address)


@pytest.mark.parametrize("address", [OWN, f"{OWN}/", FREE])
def test_the_own_and_a_free_server_are_sent_weights(tmp_path: Path, address: str) -> None:
    assert client(tmp_path, address).init_communicator(device="cpu") == "cpu has joined"
    assert not (tmp_path / "facts").exists()


def test_another_server_is_asked_and_not_sent_weights(tmp_path: Path) -> None:
    other = client(tmp_path, OTHER)
    assert other.chat() == "answer"
    with pytest.raises(ConfigError, match=OTHER):
        other.init_communicator(device="cpu")
    assert OTHER in (tmp_path / "facts" / "foreign-server.json").read_text()
