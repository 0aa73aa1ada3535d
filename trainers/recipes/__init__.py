"""Packaged recipes: TRL scripts with YAML settings, which `grpo-run train` and torchrun run alike.

Start with `recipe.py` (what a recipe may contain) and `__main__.py` (the script). `settings.py` parses the
YAML, `training.py` is shared training code, `arithmetic.py` and `gsm8k.py` are the tasks with rewards in
`rewards.py`. Imports modules of `trainers/` that scripts import too, and of `runtime/` only what checks
settings and limits generation.
"""
