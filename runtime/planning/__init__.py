"""Predict how much memory a training job needs, by tracing TRL's own code on tensors without data.

Start with `prediction.py`. `job.py` says what is planned, `_trace.py` runs TRL's trainer on fake tensors
(`_traced_trainer.py`) and records a timeline (`_tracker.py`, `timeline.py`), `_allocator.py` replays it, and
`_terms.py` adds what a trace does not show. `changes.py` and `explaining.py` ask the same predictor
about other jobs. `plan_worker.py` is the process that traces a run for the supervisor.

Imports `runtime/memory/`, `runtime/processes/`, `runtime/upstream/` and the modules of `runtime/`. Called
by `grpo-run plan`. Loads no weights and uses no GPU.
"""
