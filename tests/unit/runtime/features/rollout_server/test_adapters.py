"""Adapters that answer as their policies do, and a server that answers with other weights in their place."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
from support.journal import event

from grpo_run.runtime.errors import AlarmRaised
from grpo_run.runtime.features.rollout_server import _adapters, _watch
from grpo_run.runtime.features.rollout_server._adapters import (
    AsyncCustody,
    PolicyAnswers,
    ask_scores,
    distance,
)
from grpo_run.runtime.rank.points import CallPoints

BASE = (-1.0, -4.0, -9.0)
KEPT = 3


class Server:
    """Answers with a vector for each name: the farther from the model's, the more an adapter was trained."""

    def __init__(self, noise: float = 0.0) -> None:
        self.held: dict[str, float] = {"": 0.0}
        self.noise, self.asked = noise, 0

    def ask(self, name: str) -> Any:
        """Return an answer; its noise differs from question to question."""
        self.asked += 1
        if name not in self.held:
            return None
        off = self.held[name]
        noise = self.noise * (-1) ** self.asked * (1 + self.asked % 3)
        return [one + off * (place - 1) + noise for place, one in enumerate(BASE)]


class Policies:
    """A trainer that sends a policy after each step."""

    def __init__(self, server: Server) -> None:
        self.server, self.answers, self.version = server, PolicyAnswers(server.ask, KEPT), 0

    def send(self, off: float) -> str:
        """Send a policy that is so far from the model, and return its name."""
        self.version += 1
        name = f"v{self.version}"
        self.server.held[name] = off
        self.server.held.pop(f"v{self.version - KEPT}", None)
        self.answers.loaded(name)
        return name

    def train(self, steps: int, by: float = 0.1) -> str:
        """Take healthy steps; return the name of the last policy."""
        for _ in range(steps):
            last = self.send(self.version * by)
            assert self.answers.doubt() == ""
        return last


@pytest.fixture(params=[0.0, 1e-3], ids=["repeatable", "noisy"])
def policies(request: pytest.FixtureRequest) -> Policies:
    """Of a server which gives equal answers, or not quite."""
    return Policies(Server(request.param))


def test_policies_vouch_once_they_differ_from_the_model(policies: Policies) -> None:
    """The first adapter is the model."""
    policies.train(KEPT)
    assert not policies.answers.vouch
    policies.train(3)
    assert policies.answers.vouch


@pytest.mark.parametrize("missing", ["load", "check"])
def test_without_an_answer_nothing_vouches_until_all_policies_are_known_again(
    policies: Policies, missing: str
) -> None:
    """A server that is too busy to answer has not proved anything."""
    policies.train(6)
    ask = policies.answers._ask
    policies.answers._ask = lambda name: None
    if missing == "load":
        policies.send(0.6)
    else:
        assert policies.answers.doubt() == ""
    policies.answers._ask = ask
    for _ in range(KEPT - 1):
        policies.train(1)
        assert not policies.answers.vouch
    policies.train(1)
    assert policies.answers.vouch


@pytest.mark.parametrize("behind", range(KEPT))
def test_a_name_that_answers_as_the_model_is_found(policies: Policies, behind: int) -> None:
    """Also one of an earlier policy: samples of it still wait."""
    policies.train(6)
    name = f"v{policies.version - behind}"
    policies.server.held[name] = 0.0
    assert policies.answers.doubt() == f"{name} answers as the model without an adapter"


def test_a_name_that_answers_as_another_policy_is_found(policies: Policies) -> None:
    """It would be trained on as if it were the newer one."""
    name = policies.train(6)
    policies.server.held[name] = policies.server.held["v5"]
    assert policies.answers.doubt() == f"{name} answers as v5"


def test_an_adapter_that_has_no_effect_from_the_first_is_found(policies: Policies) -> None:
    """No healthy step brings a policy back to the model at once."""
    policies.train(12)
    name = policies.send(0.0)
    assert policies.answers.doubt() == f"{name} answers as the model without an adapter"


@pytest.mark.parametrize("by", [0.0, 1e-7, 1e-4, 0.1])
def test_healthy_policies_are_never_in_doubt(policies: Policies, by: float) -> None:
    """However little they differ, and also if they go back step by step."""
    policies.train(10, by)
    for step in reversed(range(10)):
        policies.send(step * by)
        assert policies.answers.doubt() == ""


def test_a_server_without_adapters_effect_from_the_beginning_never_vouches(policies: Policies) -> None:
    """It cannot be told from training that has no effect."""
    policies.train(20, 0.0)
    assert not policies.answers.vouch


def test_without_answers_nothing_is_said(policies: Policies) -> None:
    """The server has no such route, or refuses the names."""
    policies.train(6)
    policies.server.held.clear()
    assert policies.answers.doubt() == ""
    silent = PolicyAnswers(lambda name: None, KEPT)
    silent.loaded("v1")
    assert (silent.doubt(), silent.vouch) == ("", False)


def test_a_single_odd_answer_is_asked_for_again(policies: Policies) -> None:
    """It may have been in an odd batch."""
    policies.train(6)
    right, odd = policies.server.ask, [list(BASE)]
    policies.answers._ask = lambda name: odd.pop() if odd else right(name)
    assert policies.answers.doubt() == ""
    policies.train(6)
    odd.append(list(BASE))
    policies.train(1)


def test_answers_to_different_prompts_are_not_compared() -> None:
    """They are infinitely far from each other."""
    assert distance([1.0], [1.0, 2.0]) == distance([], []) == float("inf")
    assert distance([1.0, 2.0], [1.5, 2.0]) == 0.5


def test_the_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's name is asked for; anything but log-probabilities is no answer."""
    said: list[Any] = []

    def request(url: str, method: str, route: str, body: Any = None, *, seconds: float) -> tuple[int, bytes]:
        said.append((route, body and body["model"]))
        if route == "/v1/models":
            return 200, json.dumps({"data": [{"id": "qwen"}]}).encode()
        if body["model"] == "gone":
            return 404, b"{}"
        if body["model"] == "odd":
            return 200, b"<html>"
        logprobs = [None, {"4": {"logprob": -1.5}}, {"5": {"logprob": -2.5}}]
        return 200, json.dumps({"choices": [{"prompt_logprobs": logprobs}]}).encode()

    for module in (_adapters, _watch):
        monkeypatch.setattr(module, "request", request)
    assert ask_scores("http://server", "") == ask_scores("http://server", "v1") == [-1.5, -2.5]
    assert ask_scores("http://server", "gone") is ask_scores("http://server", "odd") is None
    assert said[:3] == [("/v1/models", None), ("/v1/completions", "qwen"), ("/v1/completions", "v1")]


class Trainer:
    """The part of AsyncGRPO's trainer that is used."""

    def __init__(self, server: Server, *, adapters: bool = True) -> None:
        self.args = SimpleNamespace(max_staleness=KEPT - 1)
        self.state = SimpleNamespace(global_step=0)
        self.model_version = 0
        self._lora_name, self._lora_dir, self._lora_sync = "trl-policy", "/out", adapters
        self.vllm_client = SimpleNamespace(server_url="http://server")
        self._server = server

    def _sync_weight_lora(self, began: float) -> None:
        self.model_version += 1
        self._server.held[f"trl-policy-v{self.model_version}"] = self.model_version / 10


class Run:
    """A trainer under custody."""

    def __init__(self, session: Any, hooks: ExitStack, **options: Any) -> None:
        self.server = Server()
        self.trainer = Trainer(self.server, **options)
        self.points = CallPoints(train_call=1, trainer=self.trainer, hooks=hooks)
        self.custody = AsyncCustody(session, self.points)

    def step(self) -> None:
        """Take a step with four samples, and send its policy."""
        for behind in (0, 1, 2, 2, KEPT):
            self.custody.took(SimpleNamespace(model_version=self.trainer.model_version - behind))
        self.points.step_begins[0](self.trainer.state.global_step + 1)
        self.trainer.state.global_step += 1
        self.trainer._sync_weight_lora(0.0)


@pytest.fixture
def make(session: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Run]]:
    """Return a function that makes such a run."""
    with ExitStack() as hooks:

        def made(**options: Any) -> Run:
            run = Run(session, hooks, **options)
            monkeypatch.setattr(_adapters, "request", None)
            if run.custody._answers is not None:
                run.custody._answers._ask = run.server.ask
            return run

        yield made


Events = Callable[[], list[dict[str, Any]]]


def origins(events: Events) -> list[tuple[int, str, int]]:
    """Return step, origin and samples of each rollout in the journal."""
    made = [one for one in events() if one["event"] == "rollout_made"]
    return [(one["step"], one["origin"], one["samples"]) for one in made]


def test_the_journal_has_policies_and_origins(make: Callable[..., Run], events: Events) -> None:
    """Samples that the trainer drops as too old do not count."""
    run = make()
    run.trainer._sync_weight_lora(0.0)
    for _ in range(5):
        run.step()
    sent = [(one["step"], one["version"]) for one in events() if one["event"] == "rollout_weights_sent"]
    assert sent[:2] == [(0, "trl-policy-v1"), (1, "trl-policy-v2")]
    assert {samples for _, _, samples in origins(events)} == {4}
    assert [origin for _, origin, _ in origins(events)][::4] == ["cannot_tell", "meant"]


def test_samples_of_other_weights_are_not_trained_on(make: Callable[..., Run], events: Events) -> None:
    """The attempt ends at the beginning of the step."""
    run = make()
    for _ in range(7):
        run.step()
    run.server.held["trl-policy-v6"] = 0.0
    with pytest.raises(AlarmRaised) as raised:
        run.step()
    assert raised.value.alarm is not None
    assert (raised.value.alarm.cause, raised.value.alarm.step) == ("rollout_stale", 8)
    assert "trl-policy-v6 answers as the model without an adapter" in raised.value.alarm.sentence
    assert origins(events)[-1] == (8, "stale", 4)


def test_a_doubt_that_a_new_server_does_not_end_is_put_aside(
    make: Callable[..., Run], session: Any, events: Events
) -> None:
    """A run is held up once for evidence that is not what it was thought to be."""
    session.journal.write(event("incident", attempt=0, step=8, train_call=1, cause="rollout_stale"))
    session.settings = session.settings.model_copy(update={"attempt": 1})
    run = make()
    for _ in range(7):
        run.step()
    run.server.held["trl-policy-v6"] = 0.0
    run.step()
    assert origins(events)[-1] == (8, "cannot_tell", 4)


def test_weights_that_do_not_go_as_adapters_cannot_be_told(make: Callable[..., Run], events: Events) -> None:
    """Nothing is asked then."""
    run = make(adapters=False)
    run.step()
    assert (run.server.asked, origins(events)) == (0, [(1, "cannot_tell", 4)])
