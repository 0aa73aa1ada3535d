"""Injected faults: when the faults of `--inject` happen in a rank, and what each of them does.

Start with `injector.py`, which decides when; `faults.py` has one function per kind, `exhaustion.py` the places at which
memory can run out. Imported only by runs with injections. May import `runtime`, `watchdog` and `trainers.patches`; the
session creates the injector.
"""
