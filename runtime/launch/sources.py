"""Read the script and the local modules that it imports, as syntax; nothing is executed.

`local_modules` reads and parses each source once. The other functions answer questions about a source:

- which directories it adds to `sys.path`: literals, `__file__`, `os.path`, `os.getcwd()` and `pathlib` are
  understood. This only saves a start: each rank compares the real path again when its script imports the
  libraries.
- which environment variables it reads and sets: `inputs.py` records the values of those read, and a rank
  that is forked with preloaded modules cannot set a variable that they have read already.
- whether it may use a Trainer or a grpo-run loop, by its imports. The answer is no only if every import is
  known to bring none; it decides how a stop before the first step ends.

Called by `cli/launch_options/`, `cli/launching/supervise.py`, `inputs.py` and
`resolution.py`. Computed names are not found.
"""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from grpo_run.runtime.errors import UsageError


def parsed(source: str) -> list[ast.AST]:
    """Return every node of a source; none if it has a syntax error, which Python reports better when it runs it."""
    try:
        return list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError, RecursionError):
        return []


def is_environ(node: ast.expr) -> bool:
    """Whether a node is `os.environ` or `environ`."""
    return (isinstance(node, ast.Attribute) and node.attr == "environ") or (
        isinstance(node, ast.Name) and node.id == "environ"
    )


def literal_text(node: ast.expr | None) -> set[str]:
    """Return the text of a literal; nothing for any other node."""
    return {node.value} if isinstance(node, ast.Constant) and isinstance(node.value, str) else set()


def keys(node: ast.expr) -> set[str]:
    """Return the literal keys of `{...}` or `dict(...)`."""
    if isinstance(node, ast.Dict):
        return set().union(*(literal_text(key) for key in node.keys if key is not None))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "dict":
        return {keyword.arg for keyword in node.keywords if keyword.arg}
    return set()


def last_name(node: ast.expr) -> str:
    """Return `b` for the expressions `b` and `a.b`; "" for any other one."""
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


PATH_FUNCTIONS: Mapping[str, Callable[..., object]] = {
    "abspath": os.path.abspath,
    "dirname": os.path.dirname,
    "expanduser": os.path.expanduser,
    "join": os.path.join,
    "normpath": os.path.normpath,
    "realpath": os.path.realpath,
    "getcwd": os.getcwd,
    "cwd": Path.cwd,
    "str": str,
    "fspath": os.fspath,
    "Path": Path,
    "PurePath": Path,
}
"""Functions that are called by these names, whatever module they are taken from."""
PATH_METHODS: Mapping[str, Callable[..., object]] = {
    "resolve": Path.resolve,
    "absolute": Path.absolute,
    "joinpath": Path.joinpath,
    "as_posix": Path.as_posix,
    "expanduser": Path.expanduser,
}


class _Unknown(Exception):
    """An expression that is not understood."""


def directories_added(nodes: Sequence[ast.AST], file: Path) -> list[str]:
    """Return the directories that a source adds before others on `sys.path`, in the order of the source.

    Args:
        nodes: the source's syntax tree.
        file: the source's path, which `__file__` stands for.
    """
    names = {"__file__": ast.Constant(str(file))}
    for node in nodes:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            names.setdefault(node.targets[0].id, node.value)  # type: ignore[arg-type]
    found = []
    for node in nodes:
        for expression in _added(node):
            try:
                value = _value(expression, names, 0)
            except (_Unknown, TypeError, ValueError, OSError, IndexError):
                continue
            if isinstance(value, str | Path) and "\0" not in str(value):
                found.append(str(value))
    return found


def _added(node: ast.AST) -> Sequence[ast.expr]:
    """The expressions that a statement or call adds in front of `sys.path`."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if node.func.attr == "insert" and _is_path(node.func.value) and len(node.args) == 2:
            return [node.args[1]]
    elif isinstance(node, ast.Assign):
        for target in node.targets:
            sliced = isinstance(target, ast.Subscript) and _is_path(target.value)
            if sliced or _is_path(target):
                return _elements(node.value)
    return []


def _elements(value: ast.expr) -> Sequence[ast.expr]:
    """The elements of `[...]`, also in `[...] + sys.path` and `[..., *sys.path]`."""
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add):
        return _elements(value.left)
    if isinstance(value, ast.List | ast.Tuple):
        return [element for element in value.elts if not isinstance(element, ast.Starred)]
    return []


def _is_path(node: ast.expr) -> bool:
    """Whether a node is `sys.path`."""
    return (
        isinstance(node, ast.Attribute)
        and node.attr == "path"
        and isinstance(node.value, ast.Name)
        and node.value.id == "sys"
    )


def _value(node: ast.expr, names: Mapping[str, ast.expr], depth: int) -> object:
    """Evaluate an expression of paths.

    Raises:
        _Unknown: it is not one.
    """
    if depth > 20:
        raise _Unknown
    if isinstance(node, ast.Constant) and isinstance(node.value, str | int):
        return node.value
    if isinstance(node, ast.Name) and node.id in names:
        return _value(names[node.id], names, depth + 1)
    if isinstance(node, ast.Attribute):
        if node.attr in ("pardir", "curdir"):
            return getattr(os, node.attr)
        return getattr(_path(node.value, names, depth), _property(node.attr))
    if isinstance(node, ast.Subscript):
        return _value(node.value, names, depth + 1)[_value(node.slice, names, depth + 1)]  # type: ignore[index]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        return _path(node.left, names, depth) / str(_value(node.right, names, depth + 1))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return str(_value(node.left, names, depth + 1)) + str(_value(node.right, names, depth + 1))
    if isinstance(node, ast.JoinedStr):
        return "".join(
            str(_value(part.value if isinstance(part, ast.FormattedValue) else part, names, depth + 1))
            for part in node.values
        )
    if isinstance(node, ast.Call) and not node.keywords:
        return _called(node, names, depth)
    raise _Unknown


def _called(node: ast.Call, names: Mapping[str, ast.expr], depth: int) -> object:
    function = node.func
    arguments = [_value(argument, names, depth + 1) for argument in node.args]
    name = last_name(function)
    if isinstance(function, ast.Attribute) and name in PATH_METHODS:
        try:
            return PATH_METHODS[name](_path(function.value, names, depth), *arguments)
        except _Unknown:
            pass  # a function of a module, such as os.path.expanduser
    if name in PATH_FUNCTIONS:
        return PATH_FUNCTIONS[name](*arguments)
    raise _Unknown


def _path(node: ast.expr, names: Mapping[str, ast.expr], depth: int) -> Path:
    value = _value(node, names, depth + 1)
    if not isinstance(value, Path):
        raise _Unknown
    return value


def _property(name: str) -> str:
    if name not in ("parent", "parents", "anchor", "name"):
        raise _Unknown
    return name


MAX_FILE_BYTES = 16 << 20
"""Larger files are data, not code or configuration, and are not read."""
MAX_MODULES = 500
"""Local modules that are followed from the script."""


@dataclass(frozen=True, kw_only=True)
class ScriptSource:
    """A file of the script or of one of its modules: where it is, its bytes, and the nodes of its syntax tree."""

    path: Path
    content: bytes
    nodes: Sequence[ast.AST] = field(repr=False)


def local_modules(script: Path, first_entry: Path | None = None) -> list[ScriptSource]:
    """Return the script and the modules beside it that it imports, directly or through one another.

    Args:
        script: the file that will run.
        first_entry: the directory that Python puts first on `sys.path`; the script's if None. Directories that a source
            adds to the path are followed too.

    Raises:
        UsageError: the script cannot be read.
    """
    path = script.resolve()
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UsageError(f"script {script} cannot be read: {error.strerror}") from error
    found = [_source(path, content)]
    seen = {path}
    roots = [(first_entry or path.parent).resolve()]
    for source in found:
        roots += [Path(entry).resolve() for entry in directories_added(source.nodes, source.path)]
        for candidate in _candidates(source, roots, path.parent):
            if candidate in seen or len(found) > MAX_MODULES:
                continue
            seen.add(candidate)
            read = read_file(candidate)
            if read is not None:
                found.append(_source(candidate, read))
    return found


def imported_names(nodes: Sequence[ast.AST]) -> set[tuple[int, str]]:
    """Return the dotted names that a source imports, with the number of leading dots.

    For `from a import b`, both `a` and `a.b`; for `import a.b`, both too, because Python imports the packages first.
    """
    found: set[tuple[int, str]] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {(0, name) for alias in node.names for name in _with_packages(alias.name)}
        elif isinstance(node, ast.ImportFrom):
            package = [node.module] if node.module else []
            names = [".".join([*package, alias.name]) for alias in node.names]
            found |= {(node.level, name) for full in names for name in _with_packages(full)}
    return {(level, name) for level, name in found if all(part.isidentifier() for part in name.split("."))}


def _with_packages(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:depth]) for depth in range(1, len(parts) + 1)]


def read_file(path: Path) -> bytes | None:
    """Return the content of a regular file of moderate size, or None."""
    try:
        if not path.is_file() or path.stat().st_size > MAX_FILE_BYTES:
            return None
        return path.read_bytes()
    except OSError:
        return None


def _source(path: Path, content: bytes) -> ScriptSource:
    return ScriptSource(path=path, content=content, nodes=parsed(content.decode(errors="replace")))


def _candidates(source: ScriptSource, roots: Sequence[Path], beside: Path) -> list[Path]:
    """The files that may hold what a source imports: below a root, or relative to the source within the script's files."""
    found = []
    for level, name in sorted(imported_names(source.nodes)):
        starts = list(roots)
        if level:
            start = source.path.parents[min(level, len(source.path.parents)) - 1]
            starts = [start] if any(start.is_relative_to(root) for root in (*roots, beside)) else []
        for start in starts:
            folder = start.joinpath(*name.split("."))
            found += [folder.with_suffix(".py"), folder / "__init__.py"]
    return found


READ_AT_IMPORT = re.compile(
    r"(HF|HUGGINGFACE|TRANSFORMERS|DATASETS|TRL|PYTORCH|TORCH|TORCHINDUCTOR|OMP|KMP|MKL|OPENBLAS|GOMP)_\w+"
    r"|CUDA_VISIBLE_DEVICES|CUDA_DEVICE_ORDER|CUDA_HOME|DS_\w+|DEEPSPEED_\w+|USE_TORCH|USE_TF|USE_LIBUV|XDG_CACHE_HOME"
    r"|LD_\w+|PYTHON\w+|ACCELERATE_USE_\w+"
)
"""Variables that Python, torch, transformers, datasets, huggingface_hub, DeepSpeed or an OpenMP runtime read at import.
"""
NO_EFFECT_AT_IMPORT = re.compile(r"(PYTHON|LD_)\w+|HF_HUB_ENABLE_HF_TRANSFER|HF_XET_HIGH_PERFORMANCE")
"""Of these, the ones that no import changes anything for. Python and the dynamic loader read theirs before the first line
of a program. huggingface_hub has not used hf_transfer since 1.0, and only reports the other one, which hf_xet reads when
it downloads.
"""


def read_at_import(name: str) -> bool:
    """Whether a library reads this variable at import, so that a script that sets it must do so before."""
    return READ_AT_IMPORT.fullmatch(name) is not None and NO_EFFECT_AT_IMPORT.fullmatch(name) is None


def changes_at_import(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return the names of the variables that libraries read at import and that differ between two environments."""
    names = sorted({*before, *now})
    return [name for name in names if before.get(name) != now.get(name) and read_at_import(name)]


def variables_set(nodes: Sequence[ast.AST]) -> set[str]:
    """Return the names of the environment variables that a source assigns, in any of the usual ways."""
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load) and is_environ(node.value):
            names |= literal_text(node.slice)  # assigned or deleted, alone or among others
        elif isinstance(node, ast.AugAssign) and is_environ(node.target):
            names |= keys(node.value)  # os.environ |= {...}
        elif isinstance(node, ast.Call):
            names |= _set_by_call(node)
    return names


def _set_by_call(node: ast.Call) -> set[str]:
    function, first = node.func, node.args[0] if node.args else None
    if not isinstance(function, ast.Attribute):
        return literal_text(first) if isinstance(function, ast.Name) and function.id == "putenv" else set()
    if function.attr in ("putenv", "unsetenv"):
        return literal_text(first)
    if not is_environ(function.value):
        return set()
    if function.attr in ("setdefault", "pop"):
        return literal_text(first)
    if function.attr == "update":
        names = {keyword.arg for keyword in node.keywords if keyword.arg}
        return names.union(*(keys(argument) for argument in node.args))
    return set()


def variables_read(nodes: Sequence[ast.AST]) -> set[str]:
    """Return the names of environment variables that a source reads under a literal name."""
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Subscript) and is_environ(node.value):
            found |= literal_text(node.slice)
        elif isinstance(node, ast.Call) and node.args:
            function = node.func
            name = last_name(function)
            on_environ = isinstance(function, ast.Attribute) and is_environ(function.value)
            if name == "getenv" or (name == "get" and on_environ):
                found |= literal_text(node.args[0])
    return found


WITHOUT_TRAINER = frozenset({
    "accelerate", "bitsandbytes", "datasets", "deepspeed", "einops", "flash_attn", "huggingface_hub", "matplotlib", "mlflow",
    "numpy", "packaging", "pandas", "peft", "PIL", "psutil", "pydantic", "requests", "rich", "safetensors", "scipy", "sklearn",
    "tensorboard", "tiktoken", "tokenizers", "torch", "torchaudio", "torchvision", "tqdm", "typing_extensions", "vllm", "wandb",
    "yaml",
})  # fmt: skip
"""Packages that contain no subclass of `transformers.Trainer`."""
TRANSFORMERS = "transformers"
OWN = frozenset({"grpo_run", "grpo_run.trainers"})
CONSENSUS = "grpo_run.trainers.consensus"


def may_use_trainer(sources: Sequence[ScriptSource]) -> bool:
    """Return False only if the script and its local modules import nothing that may contain a Trainer or a loop."""
    local = {
        source.path.parent.name if source.path.stem == "__init__" else source.path.stem for source in sources
    }
    return any(_may_contain(source.nodes, local) for source in sources)


def _may_contain(nodes: Sequence[ast.AST], local: Iterable[str]) -> bool:
    known = WITHOUT_TRAINER | sys.stdlib_module_names | frozenset(local)
    for level, name in imported_names(nodes):
        package, _, rest = name.partition(".")
        if level or package in known:
            continue
        if package == TRANSFORMERS:
            if "train" in rest.lower():
                return True
        elif name not in OWN and not f"{name}.".startswith(f"{CONSENSUS}."):
            return True
    return any(
        (isinstance(node, ast.Attribute) and node.attr.endswith(("Trainer", "import_module")))
        or (isinstance(node, ast.Name) and node.id in ("__import__", "import_module"))
        for node in nodes
    )
