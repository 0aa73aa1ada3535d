"""Rank 0 waits in an exit handler for a helper in a session of its own, as loggers do.

The helper needs longer than the deadline of an idle process, and then writes `uploaded`.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys

if os.environ["RANK"] == "0":
    helper = subprocess.Popen(
        ["sh", "-c", f"sleep {sys.argv[1]}; echo done > uploaded"], start_new_session=True
    )
    atexit.register(helper.wait)
