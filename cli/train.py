"""`grpo-run train RECIPE [--set key=value ...] [launch's flags]`: run a recipe under supervision."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from grpo_run.cli import launch
from grpo_run.cli.options import identity
from grpo_run.runtime.errors import UsageError
from grpo_run.runtime.record.run_directory import default_run_id
from grpo_run.trainers.recipes.recipe import load_recipe, packaged_recipes

MODULE = "grpo_run.trainers.recipes"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see grpo-run train --help)")


def main(arguments: Sequence[str]) -> int:
    """Check the recipe, then launch the module that trains it; returns the run's exit code."""
    parser = _Parser(
        prog="grpo-run train",
        description=__doc__,
        epilog="Any flag of `grpo-run launch` may follow. Without --nproc-per-node: one rank a GPU, or one.",
    )
    parser.add_argument("recipe", help=f"{', '.join(packaged_recipes())}, or the path of a YAML file")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override one key of the recipe"
    )
    options, flags = parser.parse_known_args(arguments)
    load_recipe(options.recipe, options.set)
    words = [options.recipe, *(f"--set={setting}" for setting in options.set)]
    if not any(flag.startswith("--run-id") for flag in flags):
        flags += ["--run-id", default_run_id(Path(options.recipe).stem, [*words, *identity(flags)])]
    if not any(
        flag.startswith(("--nproc-per-node", "--nproc_per_node", "--accelerate-config")) for flag in flags
    ):
        flags += ["--nproc-per-node", _default_ranks()]
    return launch.main([*flags, "-m", MODULE, *words])


def _default_ranks() -> str:
    import torch

    return "gpu" if torch.cuda.is_available() else "1"
