"""Private names of transformers, TRL, torch, safetensors and Python that `trainers` uses, by library; version checks.

All such names are here, so that the contract tests (`tests/unit/trainers/upstream/`) report what a new release
changed. May import `runtime.errors` only; importing a module of this package imports none of the libraries.
Start reading at `trainer_names.py`.
"""
