"""Rollouts of one trainer: which are trained on, which are made again, and when the attempt ends."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.journal import event

from grpo_run.runtime.errors import AlarmRaised
from grpo_run.runtime.features.rollout_server._custody import Custody
from grpo_run.runtime.features.rollout_server._evidence import LEAST_DIFFERENCES, Kind
from grpo_run.runtime.rank.points import CallPoints
from grpo_run.runtime.upstream.vllm_names import DIFFERENCE

Events = Callable[[], list[dict[str, Any]]]


class Generation:
    """TRL's generation: it sends the trainer's weights, and asks the server for completions."""

    def __init__(self, trainer: Any, client: Any) -> None:
        self._trainer = trainer
        self.vllm_client = client

    def sync_weights(self) -> None:
        """Send the weights."""
        self.vllm_client.update_named_params([], [("weight", torch.tensor([self._trainer.weights]))])

    def generate(self, prompts: list[str]) -> tuple[Any, ...]:
        """Return completions: by which weights."""
        keywords = self._trainer.args.generation_kwargs
        made = self.vllm_client.generate(prompts[::2], n=2, generation_kwargs=keywords)
        return prompts, made["completion_ids"], None, None


class Trainer:
    """The part of a GRPO trainer that is used: each of its rollouts is one step, and changes the weights."""

    def __init__(self, client: Any) -> None:
        self.args = SimpleNamespace(seed=7, generation_kwargs=None)
        self.state = SimpleNamespace(global_step=0, num_input_tokens_seen=0)
        self.model = SimpleNamespace(training=True)
        self.accelerator = SimpleNamespace(device="cpu")
        self.weights = 0.0
        self._metrics: Any = {"train": defaultdict(list), "eval": defaultdict(list)}
        self.vllm_generation: Any = Generation(self, client)
        self.drawn: list[float] = []
        self.during: Callable[[], None] = lambda: None
        self.differences: list[float] = []

    def make(self, rows: list[str]) -> Any:
        """Make one rollout as TRL does."""
        self.vllm_generation.sync_weights()
        made = self.vllm_generation.generate(rows)[1]
        self.drawn.append(random.random())
        self.state.num_input_tokens_seen += len(rows)
        self._metrics["train"][DIFFERENCE].append(self.differences.pop(0) if self.differences else 1e-7)
        return made


class Run:
    """A trainer under custody."""

    def __init__(self, session: Any, client: Any, hooks: ExitStack) -> None:
        self.trainer = Trainer(client)
        self.points = CallPoints(train_call=1, trainer=self.trainer, hooks=hooks)
        self.custody = Custody(session, self.points)

    def step(self) -> float:
        """Make a rollout, take a step, and return the weights that the rollout was made with."""
        made = self.custody.make(self.trainer.make, ["a", "b"])
        self.trainer.state.global_step += 1
        self.trainer.weights += 1.0
        return float(made[0][0])


@pytest.fixture(autouse=True)
def _keep_generators() -> Iterator[None]:
    """Restore the generators."""
    python, state = random.getstate(), torch.random.get_rng_state()
    yield
    random.setstate(python)
    torch.random.set_rng_state(state)


@pytest.fixture
def run(session: Any, client: Any) -> Iterator[Run]:
    """A run."""
    with ExitStack() as hooks:
        yield Run(session, client, hooks)


@pytest.fixture
def origins(events: Events) -> Callable[[], list[tuple[int, str]]]:
    """Return step and origin of each rollout in the journal."""
    return lambda: [(one["step"], one["origin"]) for one in events() if one["event"] == "rollout_made"]


def test_rollouts_of_a_healthy_server_are_made_once(
    run: Run, client: Any, events: Events, origins: Callable[[], Any]
) -> None:
    """The journal has what was sent, and what vouches for each rollout."""
    assert [run.step() for _ in range(LEAST_DIFFERENCES + 1)] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    sent = [one for one in events() if one["event"] == "rollout_weights_sent"]
    assert [one["version"] for one in sent] == [f"run-1:0:{step}:{step}" for step in range(1, 7)]
    assert len({one["digest"] for one in sent}) == 6
    made = [one for one in events() if one["event"] == "rollout_made"]
    assert origins() == [(step, "meant") for step in range(1, 7)]
    assert {one["because"] for one in made} == {"version, fingerprint"}
    assert client.joined == 0


def test_requests_have_seeds_by_step_and_number(run: Run, client: Any, session: Any) -> None:
    """They depend on nothing that a restart changes; one that the script has set stays."""
    for _ in range(3):
        run.step()
    first = list(client.seeds)
    assert len(set(first)) == 3
    with ExitStack() as hooks:
        again = Run(session, client, hooks)
        again.trainer.state.global_step = 1
        again.step()
        assert client.seeds[3:] == first[1:2]
        again.trainer.args.generation_kwargs = {"seed": 5}
        again.step()
        assert client.seeds[-1] == 5


@pytest.mark.parametrize("moment", ["before", "during"])
def test_a_server_that_is_started_again_is_sent_the_weights(
    run: Run, server: Any, client: Any, session: Any, origins: Callable[[], Any], moment: str
) -> None:
    """Between two rollouts, and while it generates: TRL repeats the request, and gets other samples."""
    run.step()
    original = client.generate
    if moment == "before":
        server.start_again()
    else:

        def generate(*args: Any, **kwargs: Any) -> Any:
            client.generate = seeded
            server.start_again()
            return original(*args, **kwargs)

        seeded, client.generate = client.generate, generate
    assert run.step() == 1.0
    assert client.joined == 1
    stale = [(2, "stale")] if moment == "during" else []
    assert origins() == [(1, "meant"), *stale, (2, "meant")]
    assert sum("started again" in text for text in session.notified) == 1


def test_samples_that_differ_are_thrown_away(run: Run, client: Any, origins: Callable[[], Any]) -> None:
    """The rollout is made again as if it had not been made before: seeds, generators and metrics."""
    for _ in range(LEAST_DIFFERENCES):
        run.step()
    random.seed(1)
    expected = [random.random(), random.random()]
    random.seed(1)
    run.trainer.differences = [0.5]
    seeds = len(client.seeds)
    run.step()
    run.step()
    assert run.trainer.drawn[-3:] == [expected[0], *expected]
    assert client.seeds[seeds] == client.seeds[seeds + 1] != client.seeds[seeds + 2]
    assert run.trainer.state.num_input_tokens_seen == 2 * (LEAST_DIFFERENCES + 2)
    assert run.trainer._metrics["train"][DIFFERENCE] == [1e-7] * (LEAST_DIFFERENCES + 2)
    assert origins()[LEAST_DIFFERENCES:] == [(6, "stale"), (6, "meant"), (7, "meant")]


def test_stale_weights_end_the_attempt_before_they_are_trained_on(
    run: Run, server: Any, origins: Callable[[], Any]
) -> None:
    """Sending them again has not helped."""
    run.step()
    server.takes = False
    with pytest.raises(AlarmRaised) as raised:
        run.step()
    alarm = raised.value.alarm
    assert alarm is not None
    assert (alarm.cause, alarm.step, alarm.signature) == ("rollout_stale", 2, "rollout_stale:fingerprint")
    assert alarm.sentence.startswith("A rollout of step 2 is not of the weights that were sent last: ")
    assert origins() == [(1, "meant")]


@pytest.mark.parametrize("kind", list(Kind))
def test_a_run_is_not_held_up_twice(
    kind: Kind, session: Any, client: Any, server: Any, origins: Callable[[], Any]
) -> None:
    """The attempt before has ended for it, and it is no better with another server: it counts as usual, up to
    that step and later; other evidence still counts.
    """
    session.journal.write(
        event("incident", attempt=0, step=LEAST_DIFFERENCES + 1, train_call=1, cause="rollout_stale")
    )
    session.settings = session.settings.model_copy(update={"attempt": 1})
    with ExitStack() as hooks:
        run = Run(session, client, hooks)
        for _ in range(LEAST_DIFFERENCES):
            run.step()
        if kind is Kind.fingerprint:
            server.takes = False
        elif kind is Kind.version:
            server.says = "x"
        else:
            run.trainer.differences = [0.5] * 20
        for _ in range(5):
            run.step()
        assert sum("counts as usual" in text for text in session.notified) == 1
        assert [one for _, one in origins()][-5:] == ["cannot_tell"] * 5
        assert run.custody.state()["rollout_server"]["ignored"] == [kind]
        if kind is not Kind.version:
            return
        server.takes = False
        with pytest.raises(AlarmRaised):
            run.step()


def test_an_alarm_of_long_ago_does_not_count(session: Any, client: Any, server: Any) -> None:
    """The steps after it are watched as ever."""
    session.journal.write(event("incident", attempt=0, step=2, train_call=1, cause="rollout_stale"))
    session.settings = session.settings.model_copy(update={"attempt": 1})
    with ExitStack() as hooks:
        run = Run(session, client, hooks)
        for _ in range(3):
            run.step()
        server.takes = False
        with pytest.raises(AlarmRaised):
            run.step()


def test_a_checkpoint_has_the_baseline(run: Run, session: Any, client: Any, server: Any) -> None:
    """A server that began anew, and does not take weights, is found at the first rollout after a resume."""
    for _ in range(3):
        run.step()
    server.start_again()
    with ExitStack() as hooks:
        resumed = Run(session, client, hooks)
        resumed.points.load(run.points.state())
        assert resumed.custody.state() == run.custody.state()
        resumed.trainer.state.global_step, resumed.trainer.weights = 3, 3.0
        server.takes = False
        with pytest.raises(AlarmRaised):
            resumed.step()


def test_an_evaluation_is_not_judged_by_its_log_probabilities(run: Run, origins: Callable[[], Any]) -> None:
    """Its prompts and its length are others."""
    for _ in range(LEAST_DIFFERENCES):
        run.step()
    run.trainer.model.training = False
    run.trainer.differences = [0.5]
    run.custody.make(run.trainer.make, ["a"])
    assert len(origins()) == LEAST_DIFFERENCES


def test_a_server_that_can_not_tell(run: Run, server: Any, events: Events) -> None:
    """The journal says so; nothing else changes."""
    server.versions = server.scores = False
    run.step()
    (made,) = [one for one in events() if one["event"] == "rollout_made"]
    assert (made["origin"], made["samples"]) == ("cannot_tell", 2)
