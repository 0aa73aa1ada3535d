"""What the result of a run depends on besides its command: files, variables, settings and versions.

Recorded in `run.json` when a run begins, and compared when the same command continues it, so that an edited
script or another variable does not change a run unnoticed. The git commit of the code is recorded as
information; nothing is decided by it. Called by `cli/launch.py`, `cli/resume.py` and
`cli/launch_options/run_inputs.py`. Reads syntax and bytes only: a module that is imported under a computed
name, and data that the script reads, are not seen.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from grpo_run.runtime.files import short_path
from grpo_run.runtime.launch.sources import ScriptSource, parsed, read_file, variables_read

SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|API_?KEY|ACCESS_KEY|PRIVATE", re.IGNORECASE)
"""Names of variables whose values are recorded as digests only."""
DIGEST = "sha256:"
"""How the recorded value of such a variable begins."""
ALWAYS_COMPARED = ("SEED", "PYTHONHASHSEED", "CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE")
"""Variables that libraries read and that may change results, whether the script names them or not."""
NEVER_COMPARED = re.compile(
    r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|(MASTER|TORCHELASTIC|GRPO_RUN|PET)_\w+"
    r"|(SLURM|PBS|LSB|KUBERNETES|SSH|XDG|WANDB|AWS|GCP|AZURE)_\w+|CUDA_VISIBLE_DEVICES|HOSTNAME|USER|LOGNAME|HOME|PATH|PWD"
    r"|OLDPWD|SHLVL|TERM|DISPLAY|TMPDIR|TEMP|TMP|LANG|LC_\w+|HF_HOME|HF_HUB_OFFLINE|HF_DATASETS_OFFLINE"
)
"""Variables that each launch or each machine sets anew. A scheduler that starts a preempted run again must find it."""
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
    """Digests of files by path, values or digests of variables, settings of the launch, and versions by name."""

    files: dict[str, str] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "files": self.files, "variables": self.variables, "settings": self.settings, "versions": self.versions,
        }  # fmt: skip

    @classmethod
    def from_json(cls, value: object) -> Inputs | None:
        """Return recorded inputs; None if the value is not of this form."""
        if not isinstance(value, dict) or not all(isinstance(value.get(name), dict) for name in cls.names()):
            return None
        return cls(**{name: {str(k): str(v) for k, v in value[name].items()} for name in cls.names()})

    @staticmethod
    def names() -> tuple[str, ...]:
        """The names of the groups."""
        return ("files", "variables", "settings", "versions")


def changes_of_training(recorded: Inputs, now: Inputs) -> list[str]:
    """Describe what changed and may change the training: files, variables and settings."""
    found = []
    for path, digest in sorted(recorded.files.items()):
        if path not in now.files:
            found.append(f"{path} is no longer used")
        elif now.files[path] != digest:
            found.append(f"{path} was edited")
    found += [f"{path} is new" for path in sorted(now.files.keys() - recorded.files.keys())]
    for group in ("variables", "settings"):
        found += list(_changes(getattr(recorded, group), getattr(now, group)))
    return found


def changes_of_versions(recorded: Inputs, now: Inputs) -> list[str]:
    """Describe libraries with another version."""
    return list(_changes(recorded.versions, now.versions))


def _changes(recorded: Mapping[str, str], now: Mapping[str, str]) -> Iterator[str]:
    for name in sorted(recorded.keys() | now.keys()):
        before, after = recorded.get(name), now.get(name)
        if before != after:
            secret = any(value is not None and value.startswith(DIGEST) for value in (before, after))
            shown = "changed" if secret else f"{before or 'not set'} -> {after or 'not set'}"
            yield f"{name} {shown}"


def collect(
    sources: Sequence[ScriptSource],
    arguments: Sequence[str],
    environment: Mapping[str, str],
    settings: Mapping[str, object],
) -> Inputs:
    """Read the inputs of a run.

    Args:
        sources: the script and its local modules.
        arguments: the script's arguments; files that they name are configuration.
        environment: the variables of the ranks.
        settings: options of the launch that change training, by name.
    """
    contents = {source.path: source.content for source in sources}
    trees = [source.nodes for source in sources]
    for path in files_named(arguments):
        content = None if path in contents else read_file(path)
        if content is not None:
            contents[path] = content
            trees += [parsed(content.decode(errors="replace"))] if path.suffix == ".py" else []
    names = {*ALWAYS_COMPARED}.union(*map(variables_read, trees))
    return Inputs(
        files={short_path(path): hashlib.sha256(content).hexdigest() for path, content in contents.items()},
        variables={
            name: recorded_value(name, environment[name])
            for name in sorted(names)
            if name in environment and not NEVER_COMPARED.fullmatch(name)
        },
        settings={name: str(value) for name, value in settings.items()},
        versions=dict(_versions()),
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


def recorded_value(name: str, value: str) -> str:
    """Return what is recorded of a variable: its value, or a digest if it looks like a secret or is long."""
    if SECRET.search(name) or len(value) > 200:
        return f"{DIGEST}{hashlib.sha256(value.encode(errors='surrogateescape')).hexdigest()[:16]}"
    return value


def _versions() -> Iterator[tuple[str, str]]:
    for name in DISTRIBUTIONS:
        try:
            yield name, version(name)
        except PackageNotFoundError:
            continue


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
