"""Memory of a run as ranks and supervisor share it: the memory plan, facts, files, host accounting.

Start with `plan.py`, what is changed so that the next attempt needs less memory. `facts.py` has the facts
of a call that decide it, and `files.py` their files. The `host_*` modules sample the host's memory while
ranks run and keep the last sample on disk. Imports `watchdog/` and the modules of `runtime/`. What follows
from a lack of memory is decided in `runtime/supervisor/`.
"""
