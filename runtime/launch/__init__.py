"""The request for a run: its configuration, its parallelism, its script and the faults to inject.

Start with `config.py`: the configuration of a run, declared once. `rank_settings.py` carries it to the
ranks, `injections.py` reads `--inject`, `sources.py` and `resolution.py` read the training script as
syntax, `inputs.py` records what a result depends on, and the `accelerate*` modules apply an accelerate
configuration file. Imports `runtime/history/`, `runtime/memory/`, `runtime/snapshots/` and `watchdog/`.
Starts no process.
"""
