"""Packaged recipes: TRL scripts with YAML settings, which `grpo-run train` and torchrun run alike.

May import `runtime.errors` and nothing of the guard. Start reading at `recipe.py` (what a recipe may contain)
and `__main__.py` (the script).
"""
