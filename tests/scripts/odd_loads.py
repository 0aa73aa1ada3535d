"""`grpo.py` on one rank, disturbed once in each of its first starts but the last.

Start 1 is killed at the end of step 6, start 2 while it loads the optimizer's state, start 3 at the end of
step 10. Start 4 truncates what start 3 has left in the memory that TEST_STAGING names, after the launcher has
looked at it, and not while a checkpoint is written from it. What start 1 has left may not be on disk yet, and
no start takes it again. The number of the start is kept in `starts` in the working directory.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
from pathlib import Path
from typing import Any

import grpo
import tiny
from transformers import Trainer

STARTS = Path("starts")
KILLED_AT = {1: 6, 3: 10}


def kill_while_loading(trainer: Any, checkpoint: str | None) -> None:
    print(f"loading {checkpoint}", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    start = int(STARTS.read_text()) + 1 if STARTS.exists() else 1
    STARTS.write_text(str(start))
    if start in KILLED_AT:
        tiny.callbacks = lambda arguments: [tiny.KillOnce(KILLED_AT[start], Path(f"killed-{start}"))]
    if start == 2:
        Trainer._load_optimizer_and_scheduler = kill_while_loading
    if start == 4:
        memory = Path(os.environ["TEST_STAGING"])
        damaged = list(memory.rglob("checkpoint-[89]/optimizer.pt"))
        with contextlib.ExitStack() as locks:
            for lock in memory.rglob("slot*/lock"):
                fcntl.flock(locks.enter_context(lock.open()), fcntl.LOCK_EX)
            for path in damaged:
                os.truncate(path, 100)
        print(f"{len(damaged)} files are truncated", flush=True)
    grpo.main()


if __name__ == "__main__":
    main()
