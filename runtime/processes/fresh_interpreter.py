"""The command of a fresh interpreter that runs one of our functions: a rank, a fork that starts over, the guardian."""

from __future__ import annotations

import sys

STARTED_WITH = "started_with"
"""Name in `__main__` of the names of the modules that the interpreter has started with."""


def command(entry: str) -> list[str]:
    """Return the command that calls an entry point.

    Python puts the working directory on the import path of `python -c`, unless it is asked not to; the bootstrap puts
    there what the script expects.

    Args:
        entry: `module:function`, called without arguments.
    """
    module, _, function = entry.partition(":")
    code = (
        f"import sys; {STARTED_WITH} = frozenset(sys.modules)\n"
        "if not getattr(sys.flags, 'safe_path', False): del sys.path[0]\n"
        f"from {module} import {function} as f; f()"
    )
    return [sys.executable, "-u", "-c", code]
