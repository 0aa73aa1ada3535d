"""Whose a source file is: the user's to mend, a library's that tells what a rank was doing, or plumbing.

Used for stacks read after the fact (`stacks.py`), for the frames a rank notes with its collectives
(`trainers.rank.recorder`) and for tracebacks (`trainers.bootstrap`), so that one line is named everywhere. Goes by the path as
the interpreter names it; links are not followed, nothing is opened.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

OUR_ROOT = str(Path(__file__).parents[2])
OUR_FOLDERS = tuple(
    f"{OUR_ROOT}/{folder}/" for folder in ("runtime", "trainers", "watchdog", "dashboards", "cli")
)
BOOTSTRAP = f"{OUR_ROOT}/trainers/bootstrap.py"
INJECTION = f"{OUR_ROOT}/trainers/rank/faults.py"
"""Faults planted for tests stand for the user's own code."""
STANDARD_LIBRARY = tuple({f"{sysconfig.get_paths()[key]}/" for key in ("stdlib", "platstdlib")})
LIBRARIES = ("/site-packages/", "/dist-packages/")
TRANSPARENT = ("torch", "accelerate", "deepspeed", "wrapt", "grpo_run")
"""Installed packages that every stack passes through: no line of theirs says what a rank was doing."""


def is_users(file: str) -> bool:
    """Outside installed packages, the standard library and this project."""
    if file == INJECTION:
        return True
    return (
        not file.startswith("<")
        and not any(folder in file for folder in LIBRARIES)
        and not file.startswith((*STANDARD_LIBRARY, *OUR_FOLDERS))
    )


def is_telling(file: str) -> bool:
    """The user's, or of a library that is not `TRANSPARENT`, as `trl/trainer/grpo_trainer.py`."""
    if file == INJECTION:
        return True
    if file.startswith(("<", *OUR_FOLDERS)):
        return False
    for folder in LIBRARIES:
        _, found, rest = file.rpartition(folder)
        if found:
            return rest.partition("/")[0] not in TRANSPARENT
    return not file.startswith(STANDARD_LIBRARY)
