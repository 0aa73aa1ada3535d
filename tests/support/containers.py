"""Containers that share /dev/shm and in which a run has the same path and command, as with `--ipc=host`.

Each container is a mount namespace. Every launch enters a new one, as after the restart of a container.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from support.runs import SCRIPTS, Run, special

SCRIPT = """import runpy, sys
sys.path.insert(0, {folder!r})
sys.argv = [{script!r}, "--seed", {seed!r}, *sys.argv[1:]]
runpy.run_path({script!r}, run_name="__main__")
"""


def missing(*options: str) -> str | None:
    """Return why containers cannot be made here, or None.

    Args:
        options: of unshare(1), for other namespaces.
    """
    tried = subprocess.run(["unshare", "-m", *options, "true"], capture_output=True, text=True)
    return f"namespaces cannot be created: {tried.stderr.strip()}" if tried.returncode else None


class Container(Run):
    """A container whose script at the common path trains with a seed of its own.

    Args:
        folder: of the test; `work` in it is the common path.
        name: of the container.
        seed: of its script: other weights.
        words: the script's arguments, equal in every container.
    """

    def __init__(self, folder: Path, name: str, seed: int, words: list[str]) -> None:
        private, common = folder / name, folder / "work"
        private.mkdir()
        common.mkdir(exist_ok=True)
        script = SCRIPTS / "sft.py"
        (private / "train.py").write_text(
            SCRIPT.format(folder=str(SCRIPTS), script=str(script), seed=str(seed))
        )
        super().__init__(
            private, ["--snapshot-every", "1", "train.py", "--output-dir", "out", *words],
            program=special("container", str(private), str(common)),
        )  # fmt: skip
        self.seen_as = common / "run"
        """The run directory as the supervisor sees it."""
