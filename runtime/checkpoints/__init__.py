"""Checkpoints on disk: manifest, publishing by rename, completeness, compatibility and deletion.

Start with `manifest.py`, which defines what a checkpoint is, then `publishing.py`, which makes one visible.
Used by the ranks when they save and resume, by the drain worker when it makes a snapshot durable, and by
`grpo-run checkpoints`. Imports `runtime/files.py` and `runtime/errors.py` only. Decides neither when to
save nor what to resume from.
"""
