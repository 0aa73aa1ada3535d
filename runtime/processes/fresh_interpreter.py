"""The command of a fresh interpreter that runs one of our functions: a rank, a fork that starts over, the guardian."""

from __future__ import annotations

import sys

from grpo_run.runtime.processes.named_signals import ignored_signals

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
    numbers = ignored_signals()
    # at once: such a signal may arrive while the interpreter imports, and its handler here is not inherited
    ignore = f"import signal; [signal.signal(n, signal.SIG_IGN) for n in {numbers}]\n" if numbers else ""
    code = (
        f"import sys; {STARTED_WITH} = frozenset(sys.modules)\n"
        f"{ignore}if not getattr(sys.flags, 'safe_path', False): del sys.path[0]\n"
        f"from {module} import {function} as f; f()"
    )
    return [sys.executable, "-u", "-c", code]
