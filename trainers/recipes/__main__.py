"""The script of a packaged recipe, run on every rank: `-m grpo_run.trainers.recipes RECIPE [--set key=value]…`.

A plain TRL script: `grpo-run train` launches it like any user's, and so does torchrun.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence

from grpo_run.runtime.errors import EXIT_USAGE, UsageError
from grpo_run.trainers.recipes.recipe import load_recipe


def main(arguments: Sequence[str] | None = None) -> None:
    """Load the recipe and train it; bad input exits with 2 and one line before anything heavy is imported."""
    parser = argparse.ArgumentParser(prog="python -m grpo_run.trainers.recipes")
    parser.add_argument("recipe", help="a packaged recipe's name, or the path of a YAML file")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides")
    options = parser.parse_args(arguments)
    # what transformers says of its own deprecations at each save is no news to whoever runs a recipe
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"transformers\.")
    try:
        recipe = load_recipe(options.recipe, options.overrides)
        if recipe.task == "arithmetic":
            from grpo_run.trainers.recipes import arithmetic

            arithmetic.train(recipe)
        else:
            from grpo_run.trainers.recipes import gsm8k

            gsm8k.train(recipe)
    except UsageError as error:
        print(f"grpo-run: {error}", file=sys.stderr)
        sys.exit(EXIT_USAGE)


if __name__ == "__main__":
    main()
