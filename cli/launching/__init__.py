"""`grpo-run launch`: its command line, which run it continues, and one supervised run from start to exit
code.

`command.py` turns the words of a command into a `LaunchCommand`; `options.py` declares the options and their
help, `_torchrun.py` has torchrun's, `_values.py` checks single values, `identity.py` finds the run.
`supervise.py` connects the parts of a run in order: `_ranks.py` is what starts them, `staging.py` the memory
of snapshots, `stop_signals.py` what signals do, `_log_files.py` the logs, and `on_end.py` runs after the end.
Called by `cli/launch.py`. Decides nothing about the run.
"""
