"""The command line of `grpo-run launch`, and what it shows.

`options.py` makes the parser of the declared options, `command.py` turns the words of a command into a
`RunRequest`, and `_display.py` shows the run. Called by `cli/launch.py`. Decides nothing about the run.
"""
