"""The git commit of the code that runs, for `run.json`. Called by `cli.launch`. Information only: nothing is decided by it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

TIMEOUT_SECONDS = 2.0
"""For each of two commands: a repository on a slow network must not delay a launch."""


def commit_of(folder: Path) -> str | None:
    """Return the commit that is checked out where a script lies, with `-dirty` if tracked files have changed.

    Returns:
        None if the folder is in no repository, git is not installed, or it does not answer in time.
    """
    commit = _git(folder, "rev-parse", "--verify", "HEAD")
    if not commit:
        return None
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return f"{commit}-dirty" if changes else commit


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},  # reading must not make the user's own git fail
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="replace").strip() if done.returncode == 0 else None
