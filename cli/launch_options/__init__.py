"""Command line of `grpo-run launch`: torchrun's options, ours, the script and its arguments.

Start with `parse.py`, which turns the words of a command into a `LaunchCommand`. `flags.py` declares the
options and their help, `words.py` finds where the script begins, and the other modules check one group of
values each. Everything that can be checked before a process starts is checked here, and every refusal is
one line. Imports `runtime/`, `watchdog/` and `dashboards/metrics/`; nothing here starts a process.
"""
