"""What proves which weights a server holds, and what does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from grpo_run.runtime.features.rollout_server._evidence import (
    MOST_FINGERPRINTS,
    Differences,
    Digest,
    Doubt,
    HeldWeights,
    Kind,
)


def digest(*tensors: torch.Tensor) -> str:
    """Return the digest of tensors."""
    made = Digest()
    passed = list(made.over((f"layer{number}", one) for number, one in enumerate(tensors)))
    assert all(one is sent for (_, one), sent in zip(passed, tensors, strict=True))
    return made.text()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8])
def test_a_digest_sees_the_smallest_change(dtype: torch.dtype) -> None:
    """One bit of one value, in any type and layout."""
    values = torch.arange(24).reshape(4, 6).to(dtype)
    changed = values.clone()
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()]
    changed.view(integers)[2, 3] ^= 1
    assert digest(values) == digest(values.clone())
    assert digest(values) != digest(changed)
    assert digest(values.T) == digest(values.T.contiguous())
    assert digest(values, changed) != digest(changed, values)


def test_the_digest_of_nothing_is_empty() -> None:
    """A release sends weights in another way: they are not known."""
    assert Digest().text() == ""


def test_a_difference_far_above_the_usual_is_doubted() -> None:
    """Healthy runs differ by half from rollout to rollout."""
    differences = Differences()
    for value in (0.02, 0.03, 0.018, 0.025):
        assert differences.doubt(9.0) is None
        differences.accept(value)
    differences.accept(0.021)
    assert differences.doubt(0.1) is None
    assert differences.doubt(float("nan")) is None
    found = differences.doubt(0.12)
    assert found is not None
    assert (found.kind, "differ by 0.12" in found.text, "usual is 0.021" in found.text) == (
        Kind.difference, True, True,
    )  # fmt: skip


def test_rounding_is_no_difference() -> None:
    """A server that computes as the trainer does differs by 1e-7, or by 1e-6."""
    differences = Differences([1e-7] * 5)
    assert differences.doubt(9e-4) is None
    assert differences.doubt(2e-3) is not None


def test_the_baseline_follows_the_run() -> None:
    """The last twenty count."""
    differences = Differences([0.01] * 20)
    for _ in range(11):
        differences.accept(0.04)
    assert len(differences.accepted) == 20
    assert differences.doubt(0.15) is None


class Sender:
    """Sends weights, which are a number, to a server, and asks what it holds."""

    def __init__(self, client: Any) -> None:
        self.notes: list[str] = []
        self.held = HeldWeights(client, self.notes.append)
        self.client = client
        self.count = 0

    def send(self, value: float) -> None:
        """Send weights as the trainer does."""
        self.count += 1
        self.client.update_named_params([], [("weight", torch.tensor([value]))])
        self.held.sent(f"run:{self.count}", f"digest of {value}")

    def doubt(self) -> Doubt | None:
        """Ask the server."""
        return self.held.doubt()


@pytest.fixture
def sender(client: Any) -> Sender:
    """A sender to the server."""
    return Sender(client)


def kind(doubt: Doubt | None) -> str:
    """Return the kind of a doubt, "" for none."""
    return "" if doubt is None else str(doubt.kind)


def test_a_healthy_server_is_never_in_doubt(sender: Sender) -> None:
    """Also before the first weights, with the same weights again, and with earlier ones."""
    assert sender.doubt() is None
    for value in (0.0, 1.0, 1.0, 2.0, 1.0):
        sender.send(value)
        assert sender.doubt() is None
    assert sender.held.given == [Kind.version, Kind.fingerprint]


def test_a_server_that_was_started_again_is_in_doubt(sender: Sender, server: Any) -> None:
    """By its version, or by its fingerprint if it has no version."""
    sender.send(1.0)
    server.start_again()
    assert kind(sender.doubt()) == "version"
    server.versions = False
    assert kind(sender.doubt()) == "fingerprint"
    sender.held.forget()
    assert sender.doubt() is None


@pytest.mark.parametrize("lag", [1, 2, None])
def test_old_weights_under_the_right_version_are_in_doubt(
    sender: Sender, server: Any, lag: int | None
) -> None:
    """Those of the sending before, of two before, and those of the beginning."""
    values = [0.0, 1.0, 2.0, 3.0, 4.0]
    for value in values:
        sender.send(value)
    server.takes = False
    server.held = values[0 if lag is None else len(values) - lag]
    sender.send(5.0)
    assert server.version == f"run:{sender.count}"
    assert kind(sender.doubt()) == "fingerprint"
    server.takes = True
    sender.send(5.0)
    assert sender.doubt() is None


def test_a_server_that_is_not_repeatable_has_no_fingerprint(sender: Sender, server: Any) -> None:
    """It is found when it is asked twice at first; its version still counts."""
    server.noise = [0.1, 0.2]
    sender.send(1.0)
    server.takes = False
    sender.send(2.0)
    assert sender.doubt() is None
    assert sender.held.given == [Kind.version]
    assert len(sender.notes) == 1


def test_one_odd_answer_is_no_doubt(sender: Sender, server: Any) -> None:
    """Another request has shared the batch."""
    sender.send(1.0)
    server.noise = [0.1, 0.1]
    assert sender.doubt() is None
    server.noise = [0.1, 0.1, 0.1]
    assert kind(sender.doubt()) == "fingerprint"


def test_a_server_that_says_nothing_is_not_in_doubt(sender: Sender, server: Any) -> None:
    """An older server, or one that is not vLLM's."""
    server.versions = server.scores = False
    sender.send(1.0)
    server.start_again()
    assert sender.doubt() is None
    assert sender.held.given == []


def test_evidence_that_is_ignored_raises_no_doubt(sender: Sender, server: Any) -> None:
    """It was found not to follow the weights."""
    sender.send(1.0)
    server.takes = False
    sender.send(2.0)
    sender.held.ignored.add(Kind.fingerprint)
    assert sender.doubt() is None
    assert sender.held.given == [Kind.version]


def test_the_fingerprint_of_the_beginning_is_never_forgotten(sender: Sender, server: Any) -> None:
    """A server that begins anew answers like it."""
    for value in range(MOST_FINGERPRINTS + 10):
        sender.send(float(value))
    assert len(sender.held.known) == MOST_FINGERPRINTS
    server.takes, server.held = False, 0.0
    sender.send(1e3)
    assert kind(sender.doubt()) == "fingerprint"
