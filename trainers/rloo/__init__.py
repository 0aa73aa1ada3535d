"""An experiment: where the memory of an RLOO step goes, on TRL's own RLOO trainer with three switches.

Start with `switches.py` (what is switched, and the four named methods). `__main__.py` is the script that
trains one setting, under any launcher; `_generation.py` and `_head.py` apply the switches, and
`_live_bytes.py` counts. Called by `grpo-run bench memory`, which compares the settings. Imports
`runtime/errors.py`, `runtime/files.py`, `runtime/upstream/` and the tokenizer of `trainers/recipes/`. Does
not supervise anything.
"""
