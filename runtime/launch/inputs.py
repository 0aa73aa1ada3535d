"""What the result of a run depends on besides its command: files, environment variables, settings and versions.

Recorded in `run.json` when a run begins, and compared when the same command continues it, so that an edited script or
another variable does not change a run without a word. Called by `cli.launch`. Reads syntax and bytes only: a module that
is imported under a computed name, and data that the script reads, are not seen.
"""

from __future__ import annotations

import ast
import hashlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

MAX_FILE_BYTES = 16 << 20
"""Larger files named in the arguments are data, not configuration, and are not read."""
MAX_MODULES = 500
"""Local modules that are followed from the script."""
SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|API_?KEY|ACCESS_KEY|PRIVATE", re.IGNORECASE)
"""Names of variables whose values are recorded as digests only."""
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
            secret = any(value is not None and value.startswith("sha256:") for value in (before, after))
            shown = "changed" if secret else f"{before or 'not set'} -> {after or 'not set'}"
            yield f"{name} {shown}"


def collect(
    script: Path, arguments: Sequence[str], environment: Mapping[str, str], settings: Mapping[str, object]
) -> Inputs:
    """Read the inputs of a run.

    Args:
        script: the file that will run.
        arguments: the script's arguments; files that they name are configuration.
        environment: the variables of the ranks.
        settings: options of the launch that change training, by name.
    """
    files = [*local_modules(script), *files_named(arguments)]
    contents = {path: content for path in dict.fromkeys(files) if (content := _read(path)) is not None}
    names = set(ALWAYS_COMPARED)
    for path, content in contents.items():
        if path.suffix == ".py":
            names |= variables_read(content.decode(errors="replace"))
    return Inputs(
        files={_shown(path): hashlib.sha256(content).hexdigest() for path, content in contents.items()},
        variables={
            name: _recorded_value(name, environment[name])
            for name in sorted(names)
            if name in environment and not NEVER_COMPARED.fullmatch(name)
        },
        settings={name: str(value) for name, value in settings.items()},
        versions=dict(_versions()),
    )


def local_modules(script: Path) -> list[Path]:
    """Return the script and the modules beside it that it imports, directly or through one another."""
    root = script.resolve().parent
    found = [script.resolve()]
    for path in found:
        content = _read(path)
        if content is None or len(found) > MAX_MODULES:
            continue
        for name in imported_names(content.decode(errors="replace")):
            for candidate in (root.joinpath(*name.split(".")).with_suffix(".py"), root.joinpath(*name.split("."), "__init__.py")):  # fmt: skip
                if candidate.is_file() and candidate not in found:
                    found.append(candidate)
    return found


def imported_names(source: str) -> set[str]:
    """Return the dotted names that a source imports; for `from a import b`, both `a` and `a.b`."""
    found: set[str] = set()
    for node in _nodes(source):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in found if all(part.isidentifier() for part in name.split("."))}


def variables_read(source: str) -> set[str]:
    """Return the names of environment variables that a source reads under a literal name."""
    found: set[str] = set()
    for node in _nodes(source):
        argument: ast.expr | None = None
        if isinstance(node, ast.Subscript) and _is_environ(node.value):
            argument = node.slice
        elif isinstance(node, ast.Call) and node.args:
            function = node.func
            name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
            on_environ = isinstance(function, ast.Attribute) and _is_environ(function.value)
            if name == "getenv" or (name == "get" and on_environ):
                argument = node.args[0]
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
            found.add(argument.value)
    return found


def files_named(arguments: Sequence[str]) -> list[Path]:
    """Return the files that arguments name, as a word or after `=`."""
    found = []
    for word in arguments:
        for text in (word, word.rpartition("=")[2]):
            if text and "\0" not in text and len(text) < 4096 and Path(text).is_file():
                found.append(Path(text).resolve())
                break
    return found


def _nodes(source: str) -> Iterator[ast.AST]:
    try:
        yield from ast.walk(ast.parse(source))
    except (SyntaxError, ValueError, RecursionError):
        return  # Python reports the error better when it runs the script


def _is_environ(node: ast.expr) -> bool:
    return (isinstance(node, ast.Attribute) and node.attr == "environ") or (
        isinstance(node, ast.Name) and node.id == "environ"
    )


def _read(path: Path) -> bytes | None:
    """The content of a regular file of moderate size, or None."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            return None
        return path.read_bytes()
    except OSError:
        return None


def _shown(path: Path) -> str:
    """Return a path relative to the working directory if it is below it."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def _recorded_value(name: str, value: str) -> str:
    if SECRET.search(name) or len(value) > 200:
        return f"sha256:{hashlib.sha256(value.encode(errors='surrogateescape')).hexdigest()[:16]}"
    return value


def _versions() -> Iterator[tuple[str, str]]:
    for name in DISTRIBUTIONS:
        try:
            yield name, version(name)
        except PackageNotFoundError:
            continue
