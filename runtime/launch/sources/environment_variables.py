"""The environment variables that a source reads, and those that it sets, under literal names.

Called by `inputs.py`, which records the values of variables that are read, and by `cli.launch_options`, because a rank
that is forked from the warm interpreter cannot set a variable that its libraries have read already. A name that is
computed is not found.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence

from grpo_run.runtime.launch.sources.syntax import is_environ, keys, last_name, literal_text

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
