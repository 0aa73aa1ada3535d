"""The script of a recipe rejects invalid input in one line, and passes the recipe to its task."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from grpo_run.trainers.recipes import arithmetic, gsm8k, memgen
from grpo_run.trainers.recipes.__main__ import main
from grpo_run.trainers.recipes.recipe import Recipe


@pytest.mark.parametrize(
    "words",
    [
        ["arithmatic"],
        ["gsm8k", "--set", "data=/nowhere"],
        ["arithmetic", "--set", "seed"],
        ["arithmetic", "--check", "--set", "grpo.num_generation=4"],
        ["arithmetic", "--check", "--set", "grpo.warmup_steps=soon"],
    ],
)
def test_invalid_input_is_one_line_and_exit_code_2(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Under torchrun, no launcher has validated it before."""
    with pytest.raises(SystemExit) as exited:
        main(words)
    assert exited.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("grpo-run: ")
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "module", "function"),
    [
        ("arithmetic", arithmetic, "train"),
        ("gsm8k", gsm8k, "train"),
        ("memgen-arithmetic", memgen, "train_arithmetic"),
    ],
)
def test_the_recipe_is_passed_to_its_task(
    name: str, module: object, function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its overrides are applied, also in the form `--set=key=value`."""
    trained: list[Recipe] = []
    train: Callable[[Recipe], None] = trained.append
    monkeypatch.setattr(module, function, train)
    main([name, "--set=seed=5", "--set", "grpo.learning_rate=1.0e-3"])
    assert [(recipe.task, recipe.seed, recipe.grpo["learning_rate"]) for recipe in trained] == [
        (name, 5, 1e-3)
    ]
