"""Checkpoints on disk: manifest, publishing by rename, completeness, compatibility and deletion.

Used by the ranks when they save and resume, by staging when it makes a snapshot durable, and by `grpo-run
checkpoints`. May import `runtime.files` and `runtime.errors` only. Start with `manifest.py`, which defines
what a checkpoint is, then `publishing.py`, which makes one visible.
"""
