"""Packaged recipes: TRL scripts with YAML settings, which `grpo-run train` and torchrun run alike.

Start with `recipe.py` (what a recipe may contain) and `__main__.py` (the script). `training.py` is shared
training code, with TRL's parser of the sections that are TRL's; `arithmetic.py`, `gsm8k.py` and `memgen.py`
are the tasks. Imports modules of `trainers/` that scripts import too, and of `runtime/` only what checks
settings and limits generation.
"""
