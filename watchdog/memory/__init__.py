"""Memory of ranks and host: exhausted memory, pressure, cgroups, and kills by the kernel.

Start with `shortage.py`, which reads from a rank's exception that memory ran out; `error_patterns.py` has
the texts and classes that libraries use. `host_sample.py` is what is known
of the host at one moment, `host_reading.py` and `cgroups.py` read it, `host_pressure.py` says when it runs
short, and `host_kills.py` follows the kernel's counters. `phase_memory.py` is a rank's memory by phase.
Imports the modules of `watchdog/` only. Does not decide which rank is the culprit (`watchdog/diagnosis/`)
or what is changed (`runtime/supervisor/memory/`).
"""
