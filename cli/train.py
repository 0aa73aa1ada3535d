"""`grpo-run train RECIPE [--set KEY=VALUE ...] [options of launch]`: train a packaged recipe or a YAML file.

Separates the recipe from the options, checks both, and hands over to `launch.py`.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from grpo_run.cli import launch
from grpo_run.cli.command_parser import CommandParser
from grpo_run.cli.launching.options import OptionWords, build_parser
from grpo_run.runtime.errors import UsageError
from grpo_run.runtime.history.run_directory import default_run_id
from grpo_run.runtime.upstream.versions import check_extra
from grpo_run.trainers.recipes.recipe import TRL_SECTIONS, load_recipe, packaged_recipes

MODULE = "grpo_run.trainers.recipes"
CHECK_SECONDS = 300.0
"""Most that importing TRL from a slow file system may take."""


def main(arguments: Sequence[str]) -> int:
    """Check the recipe, then launch the module that trains it; returns the run's exit code."""
    _help_parser().parse_args([word for word in arguments if word in ("-h", "--help")][:1] or ["recipe"])
    words = OptionWords(build_parser(), extra=("--set",))
    name, overrides, options = split(arguments, words)
    recipe = load_recipe(name, overrides)
    if recipe.memgen is not None:
        check_extra(f"the recipe {name}", "peft")
    if name not in packaged_recipes() or any(one.startswith(TRL_SECTIONS) for one in overrides):
        _check_sections(name, overrides)
    return launch.main(launch_arguments(name, overrides, options, guards=recipe.guards))


def _check_sections(name: str, overrides: Sequence[str]) -> None:
    """Let TRL's parser check the sections that are its own, in another process: what it imports takes
    seconds, and memory that a supervisor does not need.

    Raises:
        UsageError: a section is invalid.
    """
    command = [sys.executable, "-P", "-m", MODULE, "--check", name, *(f"--set={one}" for one in overrides)]
    answer = subprocess.run(
        command, check=False, capture_output=True, text=True, errors="replace", timeout=CHECK_SECONDS
    )
    if answer.returncode != 0:
        said = answer.stderr.strip().splitlines() or [f"it ended with code {answer.returncode}"]
        raise UsageError(said[-1].removeprefix("grpo-run: "))


def split(arguments: Sequence[str], words: OptionWords) -> tuple[str, list[str], list[str]]:
    """Return the recipe, its overrides and the options of `launch`, which may be in any order.

    Raises:
        UsageError: an option is unknown, or there is not exactly one recipe.
    """
    recipes: list[str] = []
    overrides: list[str] = []
    options: list[str] = []
    rest = list(arguments)
    while rest:
        option = words.next_option(rest)
        if not option:
            recipes.append(rest.pop(0))
        elif option[0].partition("=")[0] == "--set":
            setting = option[1] if len(option) == 2 else option[0].partition("=")[2]
            overrides.append(setting)
        else:
            options += option
    if len(recipes) != 1:
        found = f"found {', '.join(recipes)}" if recipes else "found none"
        raise UsageError(
            f"train takes one recipe, {found}; packaged recipes: {', '.join(packaged_recipes())}"
        )
    return recipes[0], overrides, options


def launch_arguments(
    name: str, overrides: Sequence[str], options: Sequence[str], *, guards: Sequence[str] = ()
) -> list[str]:
    """Return the arguments for `launch`; without `--nproc-per-node`, one rank per GPU, or one.

    Args:
        name, overrides, options: as `split` returns them.
        guards: of the recipe, which the options override.
    """
    recipe = [name, *(f"--set={setting}" for setting in overrides)]
    options = [*(f"--guard={guard}" for guard in guards), *options]
    given = {option.partition("=")[0].replace("_", "-") for option in options}
    if "--run-id" not in given:
        options += ["--run-id", default_run_id(Path(name).stem, recipe)]
    if "--reward-workers" not in given:
        options += ["--reward-workers", "1"]
    if not given & {"--nproc-per-node", "--accelerate-config"}:
        options += ["--nproc-per-node", _default_ranks()]
    return [*options, "-m", MODULE, *recipe]


def _help_parser() -> CommandParser:
    parser = CommandParser(
        prog="grpo-run train",
        usage="grpo-run train RECIPE [--set KEY=VALUE ...] [options of grpo-run launch]",
        description="Train a recipe under supervision.",
        epilog=(
            "Every option of `grpo-run launch` may be given. Default of --nproc-per-node: one rank per GPU,"
            " or one."
        ),
    )
    parser.add_argument("recipe", help=f"{', '.join(packaged_recipes())}, or the path of a YAML file")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override one key of the recipe"
    )
    return parser


def _default_ranks() -> str:
    import torch

    return "gpu" if torch.cuda.is_available() else "1"
