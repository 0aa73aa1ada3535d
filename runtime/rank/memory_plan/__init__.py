"""The memory plan in a rank: apply it to configurations, and publish the facts that decide it.

Start with `configuration.py`, which applies the plan when a script builds a configuration. `settings.py`
keeps what the script had set, `later_assignments.py` detects settings that the script changes again, and
`facts.py` collects what the supervisor must know to choose a plan; `computation.py`, `deepspeed.py` and
`overrides.py` contribute to it. Imports `runtime/memory/`, `runtime/upstream/`, the modules of
`runtime/rank/` and `runtime/`. Chooses no plan (`runtime/supervisor/memory/`).
"""
