"""The composition of processes: a launch, a rank and the forkserver, with the features that take part.

`launch.py` has the public call, `launch(RunRequest) -> RunResult`, with `request.py`. `_configuration.py`
checks a request and makes the configuration of its run; `_identity.py` finds which run it continues,
`torchrun.py` has torchrun's options, `_values.py` checks single values. `_supervise.py` connects the parts of
a run in order: `_ranks.py` is what starts them, `_staging.py` the memory of snapshots, `_stop_signals.py`
what signals do, `_log_files.py` the logs, `display.py` what shows it, and `_on_end.py` runs after the end.
`rank.py` is the entry of a rank, and `preload.py` what the forkserver of the ranks imports. May import
everything in `runtime/`; nothing else in `runtime/` imports it.
"""
