"""Predict how much memory a training job needs, by tracing TRL's own code on tensors without data.

Start with `prediction.py`. `job.py` says what is planned, `_trace.py` runs TRL's trainer on fake tensors
(`_traced_trainer.py`), `_tracker.py` keeps the peak of each phase, and `_terms.py` adds what a trace does not
show. `changes.py` asks the same predictor about other jobs.
`computation.py` says what of a live trainer a trace depends on, and which trainers are not traced.

Imports `runtime/memory/`, `runtime/upstream/` and the modules of `runtime/`. Called
by `grpo-run plan`. Loads no weights and uses no GPU.
"""
