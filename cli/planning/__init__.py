"""`grpo-run plan`: its options, the requested job, and the output of a prediction.

Start with `requested_job.py`, which combines the options (`options.py`) with the settings of a script or
recipe. `sources.py` reads recipes and YAML files; `script.py` lets a training script run until its first
`train()` (`_script_process.py`). `report.py` is the result, and `output.py` shows it. Called
by `cli/plan.py`. Predicts nothing itself.
"""
