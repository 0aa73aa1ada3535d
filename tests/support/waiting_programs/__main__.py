"""Run one program: start a thread like a rank's heartbeat, print the threads that are idle, and wait."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time

from support.waiting_programs.registry import PROGRAMS, in_thread


def main() -> None:
    """Run the program named on the command line."""
    name = sys.argv[1]
    if name == "lock_beside_tqdms_monitor":
        import tqdm

        from grpo_run.runtime.rank.heartbeat import idle_threads

        tqdm.tqdm(range(3))
    heart = in_thread(_beat)
    time.sleep(0.1)
    idle = idle_threads() if name == "lock_beside_tqdms_monitor" else []
    print(heart.native_id, *idle, flush=True)
    sys.stdin.readline()  # all programs begin together: some of them last `SHORT_SECONDS`
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    with contextlib.suppress(BrokenPipeError):
        PROGRAMS[name]()


def _beat() -> None:
    event = threading.Event()
    while True:
        event.wait(1.0)


if __name__ == "__main__":
    main()
