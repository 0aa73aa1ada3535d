"""The request for a run: its configuration, its parallelism, its script and the faults to inject.

Start at `config.py`: the configuration of a run, declared once. `rank_settings.py` carries it to the ranks,
`injections/` reads `--inject`, `script.py` reads the training script, and the `accelerate*` files apply an
accelerate configuration file. Imports `record`, the modules of `runtime` below it, and `watchdog`; starts no
process.
"""
