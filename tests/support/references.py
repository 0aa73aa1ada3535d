"""Undisturbed runs to compare with: by torchrun, or by plain processes forked from the warm launcher.

No part of grpo-run is in the ranks of either. `tests/integration/test_output_in_pipes.py` holds that both end
with the same weights.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from support import warm
from support.runs import BIN, SCRIPTS, digest, free_port
from support.warm import QUIET

DEADLINE_SECONDS = 180.0
cache = Path()
"""A folder that all pytest workers of the session share; set by `conftest.py`."""


def undisturbed(script: str, steps: int, *, ranks: int = 2) -> str:
    """Return the digest of the final weights of an undisturbed run; each is run once per session.

    Args:
        script: of `tests/scripts`.
        steps: its `--max-steps`; how often it saves changes no weight.
    """
    return undisturbed_command([str(SCRIPTS / script), "--max-steps", str(steps)], ranks=ranks)


def undisturbed_command(command: Sequence[str], *, ranks: int) -> str:
    """The same for a script with its arguments, but for the output directory."""
    name = hashlib.sha256(repr((ranks, *command)).encode()).hexdigest()[:12]
    folder = cache / f"{Path(command[0]).name}-{name}"
    with open(f"{folder}.lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "out" / "weights.sha256").exists():
            folder.mkdir(exist_ok=True)
            plain_ranks(folder, [*command, "--output-dir", "out"], ranks=ranks)
    return digest(folder / "out")


def plain_ranks(
    folder: Path, command: Sequence[str], *, ranks: int, environment: Mapping[str, str] | None = None
) -> None:
    """Run a script on several ranks with the environment that torchrun gives them, in warm processes.

    Args:
        environment: further variables of the ranks; what libraries read of them at import has no effect.
    """
    shared = {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "ROLE_NAME": "default", "ROLE_WORLD_SIZE": str(ranks),
    }  # fmt: skip
    output = folder / "printed.txt"
    processes = []
    try:
        with open(output, "ab") as printed:
            for rank in range(ranks):
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "ROLE_RANK": str(rank)}
                processes.append(
                    warm.start(
                        command,
                        cwd=folder,
                        environment={**os.environ, **QUIET, **(environment or {}), **shared, **own},
                        stdout=printed,
                        cold=None if environment is None else False,
                    )
                )
        codes = [process.wait(DEADLINE_SECONDS) for process in processes]
        assert codes == [0] * ranks, (codes, output.read_text(errors="replace")[-4000:])
    finally:
        for process in processes:
            process.kill()


def torchrun(
    folder: Path,
    arguments: Sequence[str],
    *,
    environment: dict[str, str] | None = None,
    timeout_seconds: float = DEADLINE_SECONDS,
    folder_of_program: Path = BIN,
) -> str:
    """Run a command line under the real torchrun, and return what it printed."""
    answer = subprocess.run(
        [str(folder_of_program / "torchrun"), *arguments],
        cwd=folder, env={**os.environ, **QUIET, **(environment or {})}, capture_output=True, text=True,
        timeout=timeout_seconds, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert answer.returncode == 0, answer.stdout[-4000:] + answer.stderr[-4000:]
    return answer.stdout
