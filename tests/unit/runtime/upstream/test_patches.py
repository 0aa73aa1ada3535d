"""Overridden attributes are restored after the block."""

from __future__ import annotations

from typing import Any

import pytest

from grpo_run.runtime.upstream.patches import override_attributes


class Trainer:
    """An object that inherits one attribute and has another."""

    inherited = "of the class"

    def __init__(self) -> None:
        self.own: Any = "of the object"


@pytest.mark.parametrize("failure", [None, RuntimeError, KeyboardInterrupt])
def test_own_and_inherited_attributes_are_restored(
    failure: type[BaseException] | None,
) -> None:
    """The block may end normally or by an exception."""
    trainer = Trainer()
    try:
        with override_attributes(trainer, inherited=1, own=2):
            assert (trainer.inherited, trainer.own) == (1, 2)
            if failure is not None:
                raise failure
    except (RuntimeError, KeyboardInterrupt):
        assert failure is not None
    assert vars(trainer) == {"own": "of the object"}
    assert trainer.inherited == "of the class"


def test_an_attribute_that_is_none_is_restored() -> None:
    """None is a common value, for example of `save_total_limit`."""
    trainer = Trainer()
    trainer.own = None
    with override_attributes(trainer, own=3):
        pass
    assert vars(trainer) == {"own": None}
