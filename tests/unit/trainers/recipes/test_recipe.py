"""Recipes load, and an invalid recipe gives one line that says what is wrong and where."""

from __future__ import annotations

import re
import subprocess
import sys
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.transcripts import Story, stories

from grpo_run.runtime.errors import ConfigError
from grpo_run.trainers.recipes import recipe as recipe_module
from grpo_run.trainers.recipes.recipe import (
    GrpoSection,
    SftSection,
    load_recipe,
    packaged_recipes,
    setting_keys,
)

PACKAGED = Path(recipe_module.__file__).parent
MINIMAL = """\
task: arithmetic
output_dir: out
grpo:
  max_steps: 10
  per_device_train_batch_size: 8
  learning_rate: 1e-4
  save_steps: 5
  num_generations: 8
  max_completion_length: 16
"""


def text_of(word: str) -> str:
    """The text that a word of a story stands for."""
    return word.replace("\\n", "\n").replace("\\0", "\0")


class RecipeShell:
    """A directory, and what loading a recipe in it says. In texts of files, `\\n` is a line break."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def file(self, name: str, text: str) -> None:
        """Write a file."""
        (self.folder / name).write_bytes(text_of(text).encode("latin-1"))

    def recipe(self, *, old: str = "", new: str = "", more: str = "") -> None:
        """Write a small recipe, with a part replaced and more at its end."""
        self.file("mine.yaml", MINIMAL.replace(text_of(old), new) + more)

    def large(self, name: str, text: str, times: str) -> None:
        """Write a file of which the last character is repeated."""
        self.file(name, text + text[-1] * int(times))

    def load(self, name: str, *settings: str, show: str = "", **more: str) -> str:
        """What is wrong, or these values.

        Args:
            settings, more: of `--set`.
        """
        try:
            loaded: Any = load_recipe(name, [*settings, *(f"{key}={value}" for key, value in more.items())])
        except ConfigError as error:
            # the end of this one depends on where the limit was reached
            said = re.sub(
                "maximum recursion depth exceeded.*", "maximum recursion depth exceeded", str(error)
            )
            return said.replace(str(PACKAGED), "PACKAGED")
        return (
            ", ".join(f"{path} {attrgetter(path)(loaded)!r}" for path in show.split(",") if path) or "loaded"
        )


@stories(__file__, "recipes.txt")
def test_recipes(story: Story, word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every story of the file."""
    monkeypatch.chdir(tmp_path)
    story.check(RecipeShell(tmp_path), word)


@pytest.mark.parametrize("name", packaged_recipes())
def test_packaged_recipes_load_and_train_on_rollout_boundaries(name: str) -> None:
    """Plain TRL does not save a rollout in progress, and rejects one that is no multiple of a group."""
    recipe = load_recipe(name)
    assert (recipe.task, recipe.output_dir) == (name, f"runs-output/{name}")
    grpo = recipe.grpo
    rollout = (grpo.steps_per_generation or grpo.gradient_accumulation_steps) * (grpo.num_iterations or 1)
    assert grpo.save_steps * grpo.gradient_accumulation_steps % rollout == 0
    assert grpo.max_steps % grpo.save_steps == 0
    assert grpo.save_total_limit >= 2
    for ranks in (1, 2, 4):
        rows = grpo.per_device_train_batch_size * (grpo.steps_per_generation or 1) * ranks
        assert rows % grpo.num_generations == 0


def test_loading_imports_no_training_library() -> None:
    """The launcher validates a recipe before it starts anything, without the time to import torch."""
    code = (
        "import sys; from grpo_run.trainers.recipes.recipe import load_recipe; load_recipe('gsm8k');"
        "print(sorted({'torch','transformers','trl','datasets','numpy'} & set(sys.modules)))"
    )
    command = [sys.executable, "-P", "-c", code]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    assert printed.stdout.strip() == "[]"


def test_every_known_key_is_accepted(tmp_path: Path) -> None:
    """The keys that hints offer are keys of the sections."""
    recipe = load_recipe("arithmetic").model_dump()
    assert {key for key in setting_keys() if "." not in key} == set(recipe)
    assert {key for key in setting_keys() if key.startswith("grpo.")} == {
        f"grpo.{key}" for key in recipe["grpo"]
    }
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(recipe))
    assert load_recipe(str(tmp_path / "mine.yaml")).model_dump() == recipe


def test_sections_contain_only_keys_of_trl() -> None:
    """Every key is an argument of TRL's configuration class in the installed release."""
    from dataclasses import fields

    from trl import GRPOConfig, SFTConfig

    assert set(GrpoSection.model_fields) <= {field.name for field in fields(GRPOConfig)}
    assert set(SftSection.model_fields) <= {field.name for field in fields(SFTConfig)}


def test_the_guards_of_a_recipe_are_checked() -> None:
    """Before a process is started, and with the place of the setting."""
    assert load_recipe("arithmetic", ['guards=["kl=stop:3"]']).guards == ["kl=stop:3"]
    with pytest.raises(ConfigError, match=r"did you mean roll-back\?"):
        load_recipe("arithmetic", ['guards=["kl=rollback"]'])


def test_the_caps_of_a_recipe_are_checked() -> None:
    """A section of their own, because TRL does not know them."""
    recipe = load_recipe("arithmetic", ["caps.repetition=64", "caps.max_time=2.5"])
    assert recipe.caps is not None
    assert (recipe.caps.repetition, recipe.caps.max_time) == (64, 2.5)
    assert load_recipe("arithmetic").caps is None
    with pytest.raises(ConfigError, match=r"caps\.repetition = '7', expected"):
        load_recipe("arithmetic", ["caps.repetition=7"])
