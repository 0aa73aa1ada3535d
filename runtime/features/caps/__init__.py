"""Caps on generation: completions that repeat themselves and rollouts that take too long are ended
(`--generation`, `trainers/caps.py`).

`rank.py` applies caps that are settings of TRL's configurations (`settings.py`), and puts `_capping.py`
around the generation of a trainer, which ends completions by a criterion of transformers' (`_criteria.py`) or
by vLLM's own detection (`_backends.py`). `_rollout.py` knows why each completion of a rollout ended, and
`_reports.py` tells the journal, so that a rollout that is done again ends after the same token.
`script.py` is what scripts call.
"""
