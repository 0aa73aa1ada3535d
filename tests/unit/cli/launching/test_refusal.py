"""A refused host tells the others why it does not come, or its user that they wait."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc

from grpo_run.cli.launching import refusal
from grpo_run.cli.main import main
from grpo_run.runtime.upstream import rendezvous_names

BAD = ("train.py", "--nnodes", "1")
"""What follows the script is the script's."""
WAITS = "The other hosts wait for this one: start it again, or stop them."


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> C10dRendezvousBackend:
    """Where hosts meet; one of them is there. It counts as another machine."""
    monkeypatch.setattr(rendezvous_names, "serves", lambda parameters: False)
    monkeypatch.setattr(refusal, "TELL_SECONDS", 2.0)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    backend = C10dRendezvousBackend(store, "pair")
    backend.set_state(pickle.dumps(SimpleNamespace(last_heartbeats={})))
    return backend


def _command(backend: C10dRendezvousBackend, *wrong: str) -> list[str]:
    place = f"127.0.0.1:{backend._store.port}"
    return [
        "launch", "--nnodes", "2", *wrong, "--rdzv-backend=c10d", "--rdzv_endpoint", place,
        "--rdzv-id", "pair", "--local-addr", "node1", "missing.py",
    ]  # fmt: skip


def _refused(backend: C10dRendezvousBackend) -> dict[str, str]:
    found = backend.get_state()
    assert found is not None
    refused: dict[str, str] = getattr(pickle.loads(found[0]), rendezvous_names.REFUSED, {})
    return refused


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (("--stop-timeout", "soon"), "--stop-timeout: invalid"),
        (("--no-such",), "--no-such"),
        ((), "missing.py"),
    ],
)
def test_the_others_are_told_why_a_host_does_not_come(
    elsewhere: C10dRendezvousBackend, capsys: pytest.CaptureFixture[str], wrong: tuple[str, ...], said: str
) -> None:
    """Whether an option or a file is wrong; the user of this host reads the same, and the code is 2."""
    assert main(_command(elsewhere, *wrong)) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert said in last
    assert WAITS not in last
    assert _refused(elsewhere) == {"node1": "was refused: " + last.removeprefix("grpo-run: ").rstrip(".")}


def test_a_second_launch_beside_one_that_takes_part_is_not_told(elsewhere: C10dRendezvousBackend) -> None:
    """The host is there."""
    _, token = elsewhere.get_state() or (b"", b"")
    other = _NodeDesc("node1", os.getpid() + 1, 0)
    elsewhere.set_state(pickle.dumps(SimpleNamespace(last_heartbeats={other: 0})), token)
    assert main(_command(elsewhere)) == 2
    assert _refused(elsewhere) == {}


def test_the_user_is_told_where_nobody_can_be(capsys: pytest.CaptureFixture[str]) -> None:
    """On the host of the endpoint itself; not where the mistake hides how many hosts there are."""
    command = ["launch", "--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:1"]
    assert main([*command, "--no-such", *BAD]) == 2
    assert capsys.readouterr().err.rstrip().endswith(WAITS)
    assert main(["launch", "--nnodes", "many", *BAD]) == 2
    assert main(["launch", "--no-such", *BAD]) == 2
    assert WAITS not in capsys.readouterr().err


def test_one_host_is_refused_as_before(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one line, and nothing is asked of the network."""
    asked: list[Callable[..., object]] = []
    monkeypatch.setattr(refusal, "probe", asked.append)
    assert main(["launch", "--no-such", "train.py"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not asked
