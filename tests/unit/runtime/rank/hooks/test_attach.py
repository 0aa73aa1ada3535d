"""`Trainer.train` is wrapped once, and a trainer that cannot be guarded is rejected."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import grpo_run.trainers
from grpo_run.runtime.call_names import LOOP
from grpo_run.runtime.errors import ConfigError
from grpo_run.runtime.rank.hooks import attach, train_call
from grpo_run.runtime.rank.hooks.attach import check_trainer, wrap_train
from grpo_run.runtime.rank.points import RankFeature
from grpo_run.runtime.rank.step.guard import AttemptState
from grpo_run.runtime.upstream import features, trainer_names


@pytest.fixture
def guard(session: Any) -> AttemptState:
    """What the calls of the attempt share."""
    return AttemptState(session)


@pytest.fixture
def module(guard: AttemptState) -> Any:
    """The module `transformers.trainer` with a wrapped `Trainer`, whose calls are in `calls`."""

    class Trainer:
        """Trains as often inside itself as `inner` says."""

        calls: list[Any] = []  # noqa: RUF012
        args = SimpleNamespace(output_dir="out")
        state = SimpleNamespace(global_step=7)

        def __init__(self, inner: int = 0) -> None:
            self.inner = inner

        def train(self, resume_from_checkpoint: Any = None, trial: Any = None, **kwargs: Any) -> str:
            """Train."""
            self.calls.append((resume_from_checkpoint, trial, kwargs))
            assert [type(self)().train() for _ in range(self.inner)] == ["plain"] * self.inner
            return "plain"

        def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> str:
            """Save."""
            return f"{output_dir} {_internal_call}"

    made: Any = ModuleType("transformers.trainer")
    made.Trainer = Trainer
    wrap_train(made, guard)
    return made


def test_a_model_that_the_script_saves_is_recorded_and_a_checkpoints_is_not(
    module: Any, events: Callable[[], list[dict[str, Any]]]
) -> None:
    """The end of the run says where the model is."""
    trainer = module.Trainer()
    assert trainer.save_model("out/checkpoint-7", _internal_call=True) == "out/checkpoint-7 True"
    assert trainer.save_model("out/checkpoint-7", True) == "out/checkpoint-7 True"
    assert trainer.save_model() == "None False"
    saved = [record for record in events() if record["event"] == "model_saved"]
    assert [(record["path"], record["step"]) for record in saved] == [(os.path.abspath("out"), 7)]


def test_outside_a_run_guarding_changes_nothing() -> None:
    """A script may always call `guard`."""
    trainer = SimpleNamespace()
    assert grpo_run.trainers.guard(trainer) is trainer
    assert vars(trainer) == {}


def test_a_hyperparameter_trial_calls_the_original(module: Any) -> None:
    """All arguments are passed through; the call is not guarded."""
    assert module.Trainer().train(True, {"lr": 1}, ignore_keys_for_eval=["x"]) == "plain"
    assert module.Trainer.calls == [(True, {"lr": 1}, {"ignore_keys_for_eval": ["x"]})]


def test_a_call_inside_another_one_is_not_guarded(
    module: Any, session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no number in the run, and is said once. The next call of the script is guarded again."""
    guarded: list[str] = []

    def run_guarded(guard: AttemptState, trainer: Any, original: Any, *rest: Any) -> str:
        guarded.append("outer")
        return f"guarded {original(trainer)}"

    monkeypatch.setattr(train_call, "run_train_call", run_guarded)
    monkeypatch.setattr(train_call, "record_model_activity", lambda trainer, session: nullcontext())
    monkeypatch.setattr(attach, "check_trainer", lambda *of_trainer: None)
    calls = [module.Trainer(inner=2).train(), module.Trainer().train()]
    assert calls == ["guarded plain", "guarded plain"]
    assert guarded == ["outer", "outer"]
    (warning,) = session.notified
    assert "inside another one" in warning


def test_a_call_inside_a_loop_is_refused(module: Any, guard: AttemptState) -> None:
    """Both would vote on steps of their own."""
    guard.running = LOOP
    with pytest.raises(ConfigError, match=r"Trainer.train\(\) is called inside a loop"):
        module.Trainer().train()
    assert module.Trainer.calls == []
    assert guard.running == LOOP


def test_wrapping_twice_has_no_effect(module: Any, guard: AttemptState) -> None:
    """Import hooks may fire twice for one module."""
    once = module.Trainer.train
    wrap_train(module, guard)
    assert module.Trainer.train is once


def test_a_trainer_without_the_wrapped_methods_is_rejected(session: Any) -> None:
    """The error names what is missing."""
    with pytest.raises(ConfigError, match="lacks _save_checkpoint"):
        check_trainer(session, SimpleNamespace(args=SimpleNamespace()))


class Needing(RankFeature):
    """A part that needs something of TRL."""

    name = "needing"

    def needs(self, session: Any) -> tuple[features.Feature, ...]:
        """Return it."""
        return (features.LEAVING_ROWS,)


@pytest.mark.parametrize(("parts", "tools"), [((), None), ((Needing(),), None), ((), [print])])
def test_features_that_a_release_lacks_are_named_in_the_first_attempt(
    session: Any, monkeypatch: pytest.MonkeyPatch, parts: tuple[RankFeature, ...], tools: Any
) -> None:
    """Each that would act on this trainer, in one line; later attempts only have it in the journal."""
    kind = type("GRPOTrainer", (), dict.fromkeys((*trainer_names.TRAINER_METHODS, "_step", "num_iterations")))
    trainer, said = kind(), list[str]()
    trainer.args, trainer.tools = SimpleNamespace(max_steps=1), tools
    monkeypatch.setattr(session, "warn", said.append)
    monkeypatch.setattr(session, "warn_in_journal", lambda text: None)
    monkeypatch.setattr(features, "version", lambda name: "0.28.0")
    check_trainer(session, trainer, parts)
    expected = [features.EXACT_ROLLOUT]
    expected += [features.LEAVING_ROWS] * len(parts) + [features.TOOLS] * bool(tools)
    assert [text.partition(", which needs ")[0] for text in said] == [f"off: {one.text}" for one in expected]
    assert "_buffered_inputs" in said[0]
    said.clear()
    session.settings = session.settings.model_copy(update={"attempt": 1})
    check_trainer(session, trainer, parts)
    assert said == []
