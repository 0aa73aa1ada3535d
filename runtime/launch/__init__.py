"""The request for a run: its configuration, its parallelism and its script.

Start with `config.py`: the configuration of a run, declared once, with the options that set it (`option.py`).
`rank_settings.py` carries it to the ranks, `inputs.py` and `imported_files.py` record what a result depends
on, `resolution.py` tells whether a script would import the preloaded libraries, and the `accelerate*` modules
apply an accelerate configuration file. Imports `runtime/history/`, `runtime/memory/`, `runtime/snapshots/`
and `watchdog/`. Starts no process.
"""
