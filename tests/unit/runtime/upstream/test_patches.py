"""Overridden attributes are restored after the block."""

from __future__ import annotations

from typing import Any

import pytest

from grpo_run.runtime.upstream.patches import noting, override_attributes, wrapped_methods


class Trainer:
    """An object that inherits one attribute and has another."""

    inherited = "of the class"

    def __init__(self) -> None:
        self.own: Any = "of the object"


@pytest.mark.parametrize("failure", [None, RuntimeError, KeyboardInterrupt])
def test_own_and_inherited_attributes_are_restored(failure: type[BaseException] | None) -> None:
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


class Model:
    """An object with one method."""

    def answer(self, question: str) -> str:
        """Answer."""
        return f"<{question}>"


def around(mark: str) -> Any:
    """Return a handler that shows where it is."""

    def handler(original: Any, question: str) -> str:
        return f"{mark}({original(question + mark)})"

    return handler


def test_handlers_are_called_from_the_outside_in() -> None:
    """None is left out, and so is a method that the object lacks; the name stays."""
    model = Model()
    with wrapped_methods(model, {"answer": [around("a"), None, around("b")], "missing": [around("c")]}):
        assert model.answer("?") == "a(b(<?ab>))"
        assert model.answer.__name__ == "answer"
        with wrapped_methods(model, {"answer": [around("c")]}):
            assert model.answer("?") == "c(a(b(<?cab>)))"
    assert vars(model) == {}
    noted: list[str] = []
    with wrapped_methods(model, {"answer": [noting(noted.append)]}):
        assert [model.answer("?")] == noted
    with wrapped_methods(model, {"answer": [None]}):
        assert vars(model) == {}
