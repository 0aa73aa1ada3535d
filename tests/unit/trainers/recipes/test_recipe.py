"""Recipes load, and an invalid recipe gives one line that says what is wrong and where."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.transcripts import Story, stories
from trl import GRPOConfig

from grpo_run.runtime.errors import ConfigError
from grpo_run.trainers.recipes import training
from grpo_run.trainers.recipes.recipe import PACKAGED, TRL_SECTIONS, load_recipe, packaged_recipes

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
            loaded = load_recipe(name, [*settings, *(f"{key}={value}" for key, value in more.items())])
            training.check(loaded)
        except ConfigError as error:
            # the end of this one depends on where the limit was reached
            return str(error).partition(" exceeded")[0].replace(str(PACKAGED), "PACKAGED")
        sections = {name: getattr(loaded, name) or {} for name in TRL_SECTIONS}
        values = loaded.model_dump() | {
            f"{name}.{key}": value for name, section in sections.items() for key, value in section.items()
        }
        return ", ".join(f"{key} {values.get(key)!r}" for key in show.split(",") if key) or "loaded"


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
    grpo = training.trainer_arguments(GRPOConfig, recipe, "grpo")
    rollout = grpo.steps_per_generation * grpo.num_iterations
    assert grpo.save_steps * grpo.gradient_accumulation_steps % rollout == 0
    assert grpo.max_steps % grpo.save_steps == 0
    assert grpo.save_total_limit >= 2
    for ranks in (1, 2, 4):
        rows = grpo.per_device_train_batch_size * grpo.steps_per_generation * ranks
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
    with pytest.raises(
        ConfigError, match=r"caps\.repetition: Input should be greater than or equal to 8, found '7'"
    ):
        load_recipe("arithmetic", ["caps.repetition=7"])
