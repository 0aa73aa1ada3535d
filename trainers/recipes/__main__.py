"""The script that trains a recipe: `-m grpo_run.trainers.recipes RECIPE [--set KEY=VALUE]...`.

A plain TRL script: `grpo-run train` and torchrun launch it like any user's script.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence

from grpo_run.runtime.errors import EXIT_USAGE, UsageError
from grpo_run.trainers.recipes.recipe import load_recipe


def main(arguments: Sequence[str] | None = None) -> None:
    """Load the recipe and train it.

    Invalid input prints one line and exits with 2.
    """
    parser = argparse.ArgumentParser(prog="python -m grpo_run.trainers.recipes")
    parser.add_argument("recipe", help="name of a packaged recipe, or path of a YAML file")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides",
        help="override a setting of the recipe; may be repeated",
    )  # fmt: skip
    parser.add_argument("--check", action="store_true", help="check the recipe, and train nothing")
    options = parser.parse_args(arguments)
    # transformers repeats its own deprecation warnings at each save
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"transformers\.")
    try:
        recipe = load_recipe(options.recipe, options.overrides)
        if options.check:
            from grpo_run.trainers.recipes import training

            training.check(recipe)
        elif recipe.task == "arithmetic":
            from grpo_run.trainers.recipes import arithmetic

            arithmetic.train(recipe)
        elif recipe.task == "memgen-arithmetic":
            from grpo_run.trainers.recipes import memgen

            memgen.train_arithmetic(recipe)
        elif recipe.task == "memgen-gsm8k":
            from grpo_run.trainers.recipes import memgen

            memgen.train_gsm8k(recipe)
        else:
            from grpo_run.trainers.recipes import gsm8k

            gsm8k.train(recipe)
    except UsageError as error:
        print(f"grpo-run: {error}", file=sys.stderr)
        sys.exit(EXIT_USAGE)


if __name__ == "__main__":
    main()
