"""What a rank inherits from the warm interpreter: its imported modules, which are the script's only if they are the same.

A rank that was forked has torch, transformers and TRL in memory before its script has said where they are to be imported
from and with which environment. Start at `restoring.py`, which hands them to the script or starts the rank over;
`imported.py` records them in the warm interpreter. Called by `preload.py` and `bootstrap.py`. Imports runtime only.
"""
