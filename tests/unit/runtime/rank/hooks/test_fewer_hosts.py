"""With fewer hosts than a run may have, a trainer takes the same steps, or says why it cannot."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from grpo_run.runtime.errors import HostsMissingError
from grpo_run.runtime.memory.script_settings import original_settings
from grpo_run.runtime.rank.hooks._fewer_hosts import keep_batch


def _trainer(steps: int = 2, data: Any = range(24), kind: type = object, **settings: Any) -> Any:
    args = SimpleNamespace(
        per_device_train_batch_size=2, gradient_accumulation_steps=steps, gradient_checkpointing=False,
        deepspeed_plugin=None, deepspeed=None, **settings,
    )  # fmt: skip
    return (
        type("Trainer", (kind,), {})()
        if kind is not object
        else SimpleNamespace(args=args, train_dataset=data)
    )


def _session(here: int = 2, full: int = 3) -> Any:
    said: list[str] = []
    return SimpleNamespace(
        settings=SimpleNamespace(full_world_size=full), world_size=here, warn=said.append, said=said
    )


def test_gradients_are_accumulated_for_hosts_that_are_away() -> None:
    """Once, with one line; the script's own setting stays known, so that its calls are recognized."""
    trainer, session = _trainer(), _session()
    for _ in range(2):
        keep_batch(session, trainer)
    assert trainer.args.gradient_accumulation_steps == 3
    assert original_settings(trainer.args)["gradient_accumulation_steps"] == 2
    (said,) = session.said
    assert said.startswith("2 of 3 ranks: gradient_accumulation_steps is 3 instead of 2")


@pytest.mark.parametrize(("here", "full"), [(3, 3), (2, 0)])
def test_all_hosts_or_a_fixed_number_change_nothing(here: int, full: int) -> None:
    """The trainer is not touched."""
    trainer, session = _trainer(steps=1), _session(here, full)
    keep_batch(session, trainer)
    assert trainer.args.gradient_accumulation_steps == 1
    assert not session.said


@pytest.mark.parametrize(
    ("trainer", "why"),
    [
        (_trainer(steps=1), "gradient_accumulation_steps 1 x 3 ranks cannot be divided among 2"),
        (_trainer(data=range(25)), "an epoch is not known to be a multiple of the 12 samples of a step"),
        (_trainer(data=iter(())), "an epoch is not known to be a multiple of the 12 samples of a step"),
        (_trainer(auto_find_batch_size=True), "the batch is also set by auto_find_batch_size"),
    ],
)
def test_another_update_is_refused(trainer: Any, why: str) -> None:
    """In one line that says why, at every call of train."""
    for _ in range(2):
        with pytest.raises(HostsMissingError) as raised:
            keep_batch(_session(), trainer)
        assert str(raised.value) == f"cannot continue with 2 of 3 ranks: {why}; waiting for all hosts"


def test_trainers_with_rollouts_are_refused() -> None:
    """Each rank draws its own completions."""
    kind = type("GRPOTrainer", (), {"__module__": "trl.trainer.grpo_trainer"})
    trainer = type("Mine", (kind,), {})()
    trainer.args, trainer.train_dataset = _trainer().args, range(24)
    with pytest.raises(HostsMissingError, match="each rank draws its own completions"):
        keep_batch(_session(), trainer)
