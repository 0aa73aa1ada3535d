"""Read a job from a training script, a configuration of TRL's own scripts, or a recipe, without executing anything.

Imports `trainers.recipes` and names of `trainers.upstream`; imported by `cli.planning`. Start at `sources.py`: `script.py` reads a
script as syntax, by way of `expressions.py` and `names.py`, and `trl_file.py` reads YAML.
"""
