"""Classification of source files: the user's code, an installed library, a framework, or this project.

Used for stacks (`stacks.py`), for the frames in a rank's collective log (`runtime.rank.collective_recorder`)
and for tracebacks (`runtime.rank.bootstrap`), so that one location is named everywhere. Classifies the path
as the interpreter reports it; does not follow links and opens nothing.
"""

from __future__ import annotations

import re
import sysconfig
from pathlib import Path

OUR_ROOT = str(Path(__file__).parents[2])
OUR_FOLDERS = tuple(
    f"{OUR_ROOT}/{folder}/" for folder in ("runtime", "trainers", "watchdog", "dashboards", "cli")
)
BOOTSTRAP = f"{OUR_ROOT}/runtime/rank/bootstrap.py"
STAND_IN = re.compile(rf"{re.escape(OUR_ROOT)}/runtime/features/\w+/_faults\.py")
"""Files of ours whose code stands for the user's own: faults that were asked for."""
STANDARD_LIBRARY = tuple({f"{sysconfig.get_paths()[key]}/" for key in ("stdlib", "platstdlib")})
LIBRARIES = ("/site-packages/", "/dist-packages/")
COMPILED = (".pyx", ".pxi", ".pxd")
"""Sources of Cython, which compiled extensions name in tracebacks by a relative path."""
FRAMEWORKS = ("torch", "accelerate", "deepspeed", "wrapt", "typing_extensions", "grpo_run")
"""Installed packages that appear in every stack: their lines do not tell what a rank was doing.

`typing_extensions` wraps functions that torch has deprecated."""


def is_user_file(file: str) -> bool:
    """Whether a file is outside installed packages, the standard library and this project."""
    if STAND_IN.fullmatch(file):
        return True
    return (
        not file.startswith("<")
        and not file.endswith(COMPILED)
        and not any(folder in file for folder in LIBRARIES)
        and not file.startswith((*STANDARD_LIBRARY, *OUR_FOLDERS))
    )


def is_outside_frameworks(file: str) -> bool:
    """Whether a file belongs to the user, or to a library outside `FRAMEWORKS` such as TRL."""
    if STAND_IN.fullmatch(file):
        return True
    if file.startswith(("<", *OUR_FOLDERS)) or file.endswith(COMPILED):
        return False
    for folder in LIBRARIES:
        _, found, rest = file.rpartition(folder)
        if found:
            return rest.partition("/")[0].removesuffix(".py") not in FRAMEWORKS
    return not file.startswith(STANDARD_LIBRARY)
