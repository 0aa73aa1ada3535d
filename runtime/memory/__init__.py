"""Memory of a run as ranks and supervisor share it: facts of calls, what scripts have set, host accounting.

`facts.py` has the facts of a call that decide how it could use less memory, and `files.py` their files.
`script_settings.py` keeps what a script has set of a trainer's configuration, whatever it was built with;
`deepspeed.py` reads what DeepSpeed's own configuration sets. The `host_*` modules sample the
host's memory while ranks run and keep the last sample on disk. Imports `watchdog/` and the modules of
`runtime/`. What follows from a lack of memory is decided in `runtime/supervisor/` and by features.
"""
