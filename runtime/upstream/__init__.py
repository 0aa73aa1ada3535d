"""Private names of Python, torch, transformers, TRL, accelerate and safetensors; versions; patches.

All such names are here, by library, so that the contract tests (`tests/unit/runtime/upstream/`) report what
a new release has changed. Start with `trainer_names.py`. `versions.py` compares what is installed, and
`patches.py` overrides attributes of a trainer for a time. Imports `runtime/errors.py` only; importing a
module of this room imports none of the libraries, except for `dispatch_modes.py`. Contains no behaviour of
its own beyond that.
"""
