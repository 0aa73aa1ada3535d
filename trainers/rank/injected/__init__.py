"""Injected faults: when the faults of `--inject` occur in a rank, and their effects.

Start with `injector.py`, which decides when; `faults.py` has one function per kind, `exhaustion.py` the places at which
memory can run out. Imported only by runs with injections. May import `runtime`, `watchdog` and `trainers.patches`; the
session creates the injector.
"""
