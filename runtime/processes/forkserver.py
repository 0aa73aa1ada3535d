"""Ranks as children of a warm interpreter: Python's forkserver, with torch, transformers and trl imported.

A fresh interpreter needs 5 to 9 s to import TRL; a child of this server needs none of it. Called by
`ranks.py`. The server is started early, while the supervisor itself still imports torch, and dies with
the supervisor. Does not run the user's script: a child calls the entry point it is given.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkServerProcess

from grpo_run.runtime import upstream
from grpo_run.runtime.processes.parent_death import die_with_parent

_IMPORT_PATH = [entry for entry in sys.path if entry]
"""In the server: what Python itself made of the environment, without the `-c` program's own entry."""

SUPERVISOR_PID = "GRPO_RUN_SUPERVISOR_PID"


def start_server(preload: Sequence[str]) -> None:
    """Start the server and let it import `preload` (module names) in the background. Idempotent.

    What the environment holds now is what the preloaded libraries will have read.
    """
    from multiprocessing import forkserver

    os.environ[SUPERVISOR_PID] = str(os.getpid())
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    with upstream.hidden_main():
        forkserver.ensure_running()


def start_child(entry: str, environment: Mapping[str, str], directory: str) -> ForkServerProcess:
    """Fork a rank from the server.

    Args:
        entry: `module:function` to call in the child, without arguments.
        environment: the child's whole environment.
        directory: its working directory.
    """
    process = multiprocessing.get_context("forkserver").Process(
        target=_child, args=(entry, dict(environment), directory), daemon=False
    )
    with upstream.hidden_main():
        process.start()
    return process


def _child(entry: str, environment: dict[str, str], directory: str) -> None:
    """The first of our code in a rank: own session, own environment, a main process again."""
    server = os.getppid()
    os.setsid()
    die_with_parent(server)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    sys.path[:] = _IMPORT_PATH  # multiprocessing had put the supervisor's there
    upstream.become_main_process()
    if "numpy" in sys.modules:
        # the server's generators were forked too; a fresh interpreter would have drawn its own seeds
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()
    module, _, function = entry.partition(":")
    getattr(importlib.import_module(module), function)()
