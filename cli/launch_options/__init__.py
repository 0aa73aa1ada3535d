"""Command line of `grpo-run launch`: torchrun's options, ours, the script and its arguments.

Start at `parse.py`, which turns the words of a command into a `LaunchCommand`. `flags.py` declares the
options, `help.py` prints them, `words.py` finds where the script begins, and the other files check one group
of values each. Everything that can be checked before a process starts is checked here, and every refusal is
one line. Imports runtime, trainers, watchdog and dashboards; nothing here starts a process.
"""
