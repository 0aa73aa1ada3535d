"""The guards of one rank: what they read of a step, when they end the attempt, and fresh seeds."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from queue import Empty, Queue
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_run.runtime.features.learning_guards.rank import PART, seed_of
from grpo_run.runtime.features.learning_guards.settings import SETTINGS, FreshSeeds, RankGuards, parse_guards
from grpo_run.runtime.launch.config import RunConfig
from grpo_run.runtime.rank.points import CallPoints
from grpo_run.runtime.rank.trainer_facts import TrainerFacts
from grpo_run.watchdog.json_values import to_json

NAN, INF = float("nan"), float("inf")
Events = Callable[[], list[dict[str, Any]]]


@pytest.fixture(autouse=True)
def _keep_seeds() -> Any:
    """Restore the generators."""
    python, state = random.getstate(), torch.random.get_rng_state()
    yield
    random.setstate(python)
    torch.random.set_rng_state(state)


@pytest.fixture
def hooks() -> Iterator[ExitStack]:
    """What ends with a call."""
    with ExitStack() as stack:
        yield stack


class Trainer:
    """The part of a GRPO trainer that is read."""

    def __init__(self) -> None:
        self.loss: Any = torch.tensor(0.5)
        self.norm: Any = torch.tensor(1.0)
        self.args = SimpleNamespace()
        self.accelerator = SimpleNamespace(
            clip_grad_norm_=lambda *arguments: self.norm,
            optimizer_step_was_skipped=False,
            mixed_precision="no",
        )
        self._metrics: dict[str, dict[str, list[float]]] = {
            "train": defaultdict(list), "eval": defaultdict(list),
        }  # fmt: skip

    def training_step(self, *arguments: Any) -> Any:
        """Return the loss."""
        return self.loss


def with_guard(config: RunConfig, text: str) -> RunConfig:
    """The configuration with a guard that is set."""
    settings = to_json(SETTINGS(rules=parse_guards([text])))
    return replace(config, features={SETTINGS.NAME: settings})


class Call:
    """A call with its guards: of a trainer, or a loop."""

    def __init__(self, session: Any, *orders: FreshSeeds, trainer: Any = None, hooks: ExitStack) -> None:
        told = {PART.name: RankGuards(fresh_seeds=orders).model_dump(mode="json")}
        session.settings = session.settings.model_copy(update={"features": told})
        self.trainer = trainer
        facts = None if trainer is None else TrainerFacts.of(trainer, 8)
        self.points = CallPoints(train_call=1, trainer=trainer, facts=facts, hooks=hooks)
        PART.call(session, self.points)
        if trainer is not None:
            self.points.read_steps()

    def begins(self, step: int) -> None:
        """Begin a step."""
        for begins in self.points.step_begins:
            begins(step)

    def ends(self, step: int, **logged: float) -> None:
        """End a step in which this was logged."""
        for note in self.points.logged:
            note(logged)
        for ends in self.points.step_ends:
            ends(step)
        self.points.norm = None

    def trains(self, step: int) -> None:
        """Take a step of the trainer."""
        self.begins(step)
        assert self.trainer.training_step() is self.trainer.loss
        assert self.trainer.accelerator.clip_grad_norm_([], 1.0) is self.trainer.norm
        self.ends(step)

    def seen(self, name: str) -> list[list[float]]:
        """What a checkpoint has of one kind of observations: steps and values."""
        found: list[list[float]] = self.points.state()["history"].get(name, [])
        return found


@pytest.mark.parametrize(
    ("loss", "norm", "expected"),
    [
        (torch.tensor(0.5), torch.tensor(1.0), True),
        (torch.tensor(NAN), torch.tensor(1.0), False),
        (torch.tensor(INF), torch.tensor(1.0), False),
        (torch.tensor(0.5), torch.tensor(NAN), False),
        (torch.tensor(0.5), torch.tensor(INF), False),
        (torch.tensor(0.5), torch.tensor(-1.0), False),
        (torch.tensor(0.5), None, True),
        (torch.tensor(0.5), 2.5, True),
        (torch.tensor(0.5), NAN, False),
        (torch.tensor(0.5), -1.0, False),
        (torch.tensor([0.5, NAN]), None, False),
        (torch.tensor([0.5, 0.2]), None, True),
        (0.5, None, True),
        (torch.tensor(2), None, True),
    ],
)
def test_loss_and_gradient_are_read_raw(
    loss: Any, norm: Any, expected: bool, session: Any, hooks: ExitStack
) -> None:
    """transformers' log shows 0 for a loss that is NaN. Losses have any shape; DeepSpeed returns the norm as
    a number, and -1 for one that is not finite.
    """
    call = Call(session, trainer=Trainer(), hooks=hooks)
    call.trainer.loss, call.trainer.norm = loss, norm
    call.trains(7)
    assert (call.points.alarm is None) is expected
    if call.points.alarm is not None:
        assert (call.points.alarm.cause, call.points.alarm.step) == ("nonfinite", 7)
        assert call.points.alarm.details["onset"] == 7


def test_a_step_that_a_gradient_scaler_skips_is_healthy(session: Any, hooks: ExitStack) -> None:
    """It looks for its scale; the weights have not changed."""
    call = Call(session, trainer=Trainer(), hooks=hooks)
    call.trainer.norm = torch.tensor(INF)
    call.trainer.accelerator.optimizer_step_was_skipped = True
    call.trainer.accelerator.mixed_precision = "fp16"
    call.trains(1)
    assert call.points.alarm is None
    call.trainer.accelerator.mixed_precision = "bf16"
    call.trains(2)
    assert call.points.alarm is not None, "DeepSpeed skips it without a scale to look for"


def test_a_bad_step_does_not_spoil_the_next_one(session: Any, hooks: ExitStack) -> None:
    """Each step counts for itself."""
    call = Call(session, trainer=Trainer(), hooks=hooks)
    for step, loss in enumerate((NAN, 0.1, 0.1, NAN), start=1):
        call.trainer.loss = torch.tensor(loss)
        call.trains(step)
    assert [step for step, _ in call.seen("not_finite")] == [1, 4]


def test_metrics_are_those_of_their_step(session: Any, hooks: ExitStack) -> None:
    """The table collects them over several steps, and is emptied when they are logged."""
    call = Call(session, trainer=Trainer(), hooks=hooks)
    table = call.trainer._metrics["train"]
    table["reward"] += [9.0]
    call.begins(1)
    table["reward"] += [0.5]
    table["entropy"] += [1.0, 2.0, NAN]
    table["completions/clipped_ratio"] += [0.25]
    call.ends(1)
    table.clear()
    call.begins(2)
    table["reward"] += [0.75]
    call.ends(2)
    call.trains(3)  # on the same rollout again
    del call.trainer._metrics  # a trainer of another class
    call.trains(4)
    assert call.seen("reward") == [[1, 0.5], [2, 0.75]]
    assert (call.seen("entropy"), call.seen("capped"), call.seen("kl")) == ([[1, 1.5]], [[1, 0.25]], [])


def test_a_mismatch_is_read_where_trl_collects_it_and_is_a_warning(
    session: Any, hooks: ExitStack, events: Events
) -> None:
    """One value for each rollout, which is the mean over all ranks; steps without a rollout do not count."""
    call = Call(session, trainer=Trainer(), hooks=hooks)
    table = call.trainer._metrics["train"]["sampling/sampling_logp_difference/mean"]
    for step in range(1, 25):
        call.begins(step)
        if step % 2:
            table.append(0.015 if step < 12 else 0.2)
        call.ends(step)
    (tripped,) = [event for event in events() if event["event"] == "guard_tripped"]
    assert (tripped["guard"], tripped["step"], tripped["onset"]) == ("mismatch", 21, 13)
    assert "since step 13: 0.2 nats per token, at the beginning 0.015." in tripped["sentence"]
    assert call.points.alarm is None
    assert call.seen("mismatch") == [[23, 0.2]]  # what follows is compared with what follows


def test_failing_tools_are_read_where_trl_collects_them_and_are_a_warning(
    session: Any, hooks: ExitStack, events: Events
) -> None:
    """A share of the calls on all ranks, one value for each rollout."""
    call = Call(session, trainer=Trainer(), hooks=hooks)
    table = call.trainer._metrics["train"]["tools/failure_frequency"]
    for step in range(1, 25):
        call.begins(step)
        table.append(0.1 if step < 18 else 0.9)
        call.ends(step)
    (tripped,) = [event for event in events() if event["event"] == "guard_tripped"]
    assert (tripped["guard"], tripped["step"], tripped["onset"]) == ("tools", 22, 18)
    assert call.points.alarm is None


@pytest.mark.parametrize("response", ["warn", "stop"])
def test_aborted_requests_are_read_of_asyncgrpos_process_before_the_trainer_logs_them(
    session: Any, hooks: ExitStack, events: Events, response: str
) -> None:
    """Which gets all of it, in order. The vote of rank 0 ends all ranks, if it is to."""
    session.config = with_guard(session.config, f"aborted={response}")
    trainer, measured = Trainer(), Queue[Any]()
    trainer.rollout_worker = SimpleNamespace(metrics_queue=measured)
    call = Call(session, trainer=trainer, hooks=hooks)
    logged = []
    for step in range(1, 25):
        call.begins(step)
        failed = 1.0 if step < 18 else 30.0
        measured.put({"rollout/vllm_retry_total": failed, "rollout/turns_mean": (9.0, 3.0)})
        measured.put({"rollout/duration_s": 0.5})
        call.ends(step)
        if step % 5 == 0:
            with suppress(Empty):
                while True:
                    logged.append(measured.get_nowait())
        if call.points.alarm is not None:
            break
    assert len(logged) == 40
    assert logged[::2] == [
        {"rollout/vllm_retry_total": 1.0 if step < 18 else 30.0, "rollout/turns_mean": (9.0, 3.0)}
        for step in range(1, 21)
    ]
    found = [event for event in events() if event["event"] == "guard_tripped"]
    assert [(one["guard"], one["step"], one["onset"]) for one in found] == [("aborted", 22, 18)] * (
        response == "warn"
    )
    assert (call.points.alarm is not None) is (response == "stop")


def test_a_trainer_is_left_as_it_was(session: Any) -> None:
    """When its call ends."""
    trainer = Trainer()
    before = dict(vars(trainer.accelerator))
    with ExitStack() as hooks:
        Call(session, trainer=trainer, hooks=hooks)
        assert "training_step" in vars(trainer)
    assert vars(trainer.accelerator) == before
    assert "training_step" not in vars(trainer)


def test_what_a_loop_logs_is_judged(session: Any, hooks: ExitStack) -> None:
    """A loss of any micro-batch that is not finite, unless a gradient scaler has skipped the step; rank 0's
    reward.
    """
    call = Call(session, hooks=hooks)
    (note,) = call.points.logged
    note({"loss": NAN})
    call.ends(1, loss=1.0, reward=0.25)
    call.ends(2)
    call.points.optimized = False
    call.ends(3, loss=INF, grad_norm=INF)
    session.is_main = False
    call.ends(4, loss=1.0, reward=0.25)
    assert (call.seen("not_finite"), call.seen("reward")) == ([[1, 1.0]], [[1, 0.25]])


def test_a_guard_that_warns_is_journaled_once(session: Any, hooks: ExitStack, events: Events) -> None:
    """Training goes on."""
    session.config = with_guard(session.config, "nonfinite=warn")
    call = Call(session, hooks=hooks)
    for step in range(1, 5):
        call.ends(step, loss=NAN)
    assert call.points.alarm is None
    tripped = [record for record in events() if record["event"] == "guard_tripped"]
    assert [(record["step"], record["guard"], record["response"]) for record in tripped] == [
        (1, "nonfinite", "warn")
    ]
    assert session.notified == [tripped[0]["sentence"]]


def test_an_alarm_has_advice(session: Any, hooks: ExitStack) -> None:
    """Of the guard, and on the checkpoint from before the onset. The first alarm counts."""
    session.config = with_guard(session.config, "reward=stop")
    call = Call(session, hooks=hooks)
    for step in range(1, 41):
        call.ends(step, reward=1.0 if step < 30 else 0.0)
    alarm = call.points.alarm
    assert alarm is not None
    assert (alarm.cause, alarm.step, alarm.signature) == ("learning_collapse", 32, "guard:reward:step32")
    assert "Look at completions" in alarm.advice[0]
    assert alarm.advice[1].endswith("(below 30) and, if it has one, another --run-dir.")
    assert json.loads(json.dumps(alarm.details)) == {
        "guard": "reward", "step": 32, "onset": 30, "sentence": alarm.sentence, "response": "stop",
    }  # fmt: skip


def test_a_resumed_run_raises_the_same_alarm(session: Any, hooks: ExitStack) -> None:
    """The history is cut in the middle, travels as JSON, and the alarm comes at the same step."""

    def alarms(restart_at: int | None) -> list[str]:
        session.notified.clear()
        call = Call(session, hooks=hooks)
        for step in range(1, 41):
            call.ends(step, reward=1.0 if step < 30 else 0.0)
            if step == restart_at:
                state = json.loads(json.dumps(call.points.state()))
                call = Call(session, hooks=hooks)
                call.points.load(state)
        return list(session.notified)

    undisturbed = alarms(None)
    assert len(undisturbed) == 1
    assert "at step 30" in undisturbed[0]
    for step in (1, 20, 31, 35):
        assert alarms(step) == undisturbed


@pytest.mark.parametrize(
    "state", [None, {}, {"history": 3}, {"history": {"reward": [1]}}, {"fresh_seeds": ["a"]}]
)
def test_a_checkpoint_without_a_readable_history_is_accepted(
    session: Any, hooks: ExitStack, state: Any
) -> None:
    """Of an older release."""
    call = Call(session, hooks=hooks)
    call.points.load(state)
    call.ends(1, reward=1.0)


ORDER = FreshSeeds(number=2, train_call=1, step=5)


def test_fresh_seeds_are_used_once_from_their_step_on(session: Any, hooks: ExitStack) -> None:
    """Not before, not again at the next step, and not again after a resume."""
    call = Call(session, ORDER, hooks=hooks)
    torch.manual_seed(1)
    call.begins(4)
    assert torch.initial_seed() == 1
    call.begins(5)
    seed = torch.initial_seed()
    assert seed == seed_of("run-1", ORDER, 0)
    torch.manual_seed(1)
    call.begins(6)
    assert torch.initial_seed() == 1
    resumed = Call(session, ORDER, hooks=hooks)
    resumed.points.load(call.points.state())
    resumed.begins(7)
    assert torch.initial_seed() == 1
    earlier = Call(session, ORDER, hooks=hooks)
    earlier.begins(9)  # resumed from a checkpoint after the step whose history knows nothing of the order
    assert torch.initial_seed() == seed


@pytest.mark.parametrize(("settings", "group"), [({}, 5), ({"vllm_mode": "colocate"}, 2)])
def test_ranks_of_one_engine_sample_alike(
    settings: dict[str, str], group: int, session: Any, hooks: ExitStack
) -> None:
    """They generate the same completions together."""
    session.rank, session.is_main = 5, False
    trainer = Trainer()
    trainer.args = SimpleNamespace(use_vllm=True, vllm_tensor_parallel_size=2, **settings)
    Call(session, ORDER, trainer=trainer, hooks=hooks).begins(5)
    assert torch.initial_seed() == seed_of("run-1", ORDER, group)


def test_seeds_differ_by_rank_and_order_and_are_reproducible() -> None:
    """Ranks that sampled alike would generate the same completions."""
    orders = [ORDER.model_copy(update={"number": number}) for number in (1, 2)]
    seeds = [seed_of("run-1", order, rank) for order in orders for rank in range(8)]
    assert len(set(seeds)) == 16
    assert seeds == [seed_of("run-1", order, rank) for order in orders for rank in range(8)]


def test_an_order_for_another_call_is_ignored(session: Any, hooks: ExitStack) -> None:
    """Calls are numbered in the run."""
    call = Call(session, ORDER.model_copy(update={"train_call": 2}), hooks=hooks)
    torch.manual_seed(1)
    call.begins(5)
    assert torch.initial_seed() == 1
