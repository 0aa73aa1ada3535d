"""Modules that a rank inherits from the warm interpreter: used only if the script would import the same ones.

A rank that was forked has torch, transformers and TRL in memory before its script has said where they are to be imported
from and with which environment. Start at `restoring.py`, which hands them to the script or starts the rank over;
`imported.py` records them in the warm interpreter. Called by `preload.py` and `bootstrap.py`. Imports runtime only.
"""
