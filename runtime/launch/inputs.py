"""What the result of a run depends on besides its command: files, variables, settings and versions.

Recorded in `run.json` when a run begins, and compared when the same command continues it, so that an edited
script does not change a run unnoticed. The files are the script, those that its arguments name, and those
that a rank has imported (`imported_files.py`). The git commit of the code is recorded as information; nothing
is decided by it. Called by `cli/resume.py` and `runtime/launching/`.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from grpo_run.runtime.launch.imported_files import digests
from grpo_run.runtime.upstream.versions import installed_versions

COMPARED_VARIABLES = ("SEED", "PYTHONHASHSEED", "CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE")
"""Variables that may change results, by their usual meaning. Their values are recorded."""
DISTRIBUTIONS = (
    "torch",
    "transformers",
    "trl",
    "accelerate",
    "deepspeed",
    "peft",
    "datasets",
    "vllm",
    "numpy",
)


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What a run depends on, each group by name.

    Attributes:
        files: digests by path.
        variables: values of the variables that are compared.
        settings: options of the launch that change training.
        versions: of libraries.
    """

    files: dict[str, str] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: object) -> Inputs | None:
        """Return recorded inputs; None if the value is not of this form."""
        names = [group.name for group in fields(cls)]
        if not isinstance(value, dict) or not all(isinstance(value.get(name), dict) for name in names):
            return None
        return cls(**{name: {str(k): str(v) for k, v in value[name].items()} for name in names})


def changes_of_training(recorded: Inputs, now: Inputs) -> list[str]:
    """Describe what changed and may change the training: files, variables and settings.

    Files that were not recorded are no change: an edited file names them.
    """
    found = []
    for path, digest in sorted(recorded.files.items()):
        if path not in now.files:
            found.append(f"{path} is gone")
        elif now.files[path] != digest:
            found.append(f"{path} was edited")
    found += _changes(recorded.variables, now.variables)
    return [*found, *_changes(recorded.settings, now.settings)]


def changes_of_versions(recorded: Inputs, now: Inputs) -> list[str]:
    """Describe libraries with another version."""
    return list(_changes(recorded.versions, now.versions))


def _changes(recorded: Mapping[str, str], now: Mapping[str, str]) -> Iterator[str]:
    for name in sorted(recorded.keys() | now.keys()):
        before, after = recorded.get(name), now.get(name)
        if before != after:
            yield f"{name} {before or 'not set'} -> {after or 'not set'}"


def collect(
    files: Iterable[str | Path], environment: Mapping[str, str], settings: Mapping[str, object]
) -> Inputs:
    """Read the inputs of a run.

    Args:
        files: the script, the files that its arguments name, and those that a rank has imported.
        environment: the variables of the ranks.
        settings: options of the launch that change training, by name.
    """
    return Inputs(
        files=digests(files, Path.cwd()),
        variables={name: environment[name] for name in COMPARED_VARIABLES if name in environment},
        settings={name: str(value) for name, value in settings.items()},
        versions=installed_versions(DISTRIBUTIONS),
    )


def files_named(arguments: Sequence[str]) -> list[Path]:
    """Return the files that arguments name, as a word or after `=`."""
    found = []
    for word in arguments:
        for text in (word, word.rpartition("=")[2]):
            if text and "\0" not in text and len(text) < 4096 and Path(text).is_file():
                found.append(Path(text).resolve())
                break
    return found


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
