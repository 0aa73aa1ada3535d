"""`grpo-run plan`: its options, the requested job, and the output of a prediction.

Start with `requested_job.py`, which combines the options (`options.py`) with the settings of a script or
recipe. `sources.py` reads a job from a file; `script.py`, `names.py` and `expressions.py` read a training
script as syntax and execute nothing. `report.py` is the result, and `output.py`, `explained.py` and
`plot.py` show it. Called by `cli/plan.py`. Imports `runtime/planning/`, `runtime/launch/`,
`trainers/recipes/`, `cli/text.py` and `dashboards/memory_plot.py`. Predicts nothing itself.
"""
