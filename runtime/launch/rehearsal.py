"""What a rank of a rehearsal is told: where it writes, and how many steps it takes.

`grpo-run rehearse` starts launches with this in one environment variable. A rank maps each output directory
that the script names to a directory of the rehearsal's, and notes what is in the real one before anything is
written, so that the rehearsal can tell afterwards whether the script has also written there. Used by
`runtime/rehearsal/`, by the choice of a checkpoint, by loops and by the feature `rehearsal`. Other runs do
not have the variable.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VARIABLE = "GRPO_RUN_REHEARSAL"
SAVE_EVERY = 2
"""Steps between the checkpoints of a rehearsal whose script saves any."""
MAX_FILES = 20_000
"""Of a real output directory that are compared."""


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """One run of a rehearsal.

    Attributes:
        folder: of this run; its outputs and what its ranks note are there.
        facts: what all runs of the rehearsal note about the real job.
        steps: at most so many optimizer steps of each call.
    """

    folder: Path
    facts: Path
    steps: int

    @property
    def variable(self) -> dict[str, str]:
        """The environment variable that carries this."""
        value = {"folder": str(self.folder), "facts": str(self.facts), "steps": self.steps}
        return {VARIABLE: json.dumps(value)}

    @property
    def outputs(self) -> Path:
        """The folder of all output directories."""
        return self.folder / "output"

    @property
    def traces(self) -> Path:
        """The folder of what ranks note."""
        return self.folder / "traces"

    def redirected(self, path: str | os.PathLike[str]) -> str:
        """Return where to write in place of a directory that the script names, and note the real one."""
        real = os.path.abspath(os.fspath(path))
        if Path(real).is_relative_to(self.outputs):
            return real
        name = hashlib.sha256(os.fsencode(real)).hexdigest()[:8]
        made = [str(one) for one in (Path(real), *Path(real).parents) if not one.exists()]
        fact = {"name": name, "path": real, "files": listing(Path(real)), "made": made}
        self.note(f"real-{name}", fact)
        # a script may write there by itself, and expect that its trainer has made it
        os.makedirs(real, exist_ok=True)
        return str(self.outputs / f"{os.path.basename(real) or 'output'}-{name}")

    def note(self, name: str, value: Any) -> None:
        """Write a fact about the real job, unless a rank has done so before."""
        self.facts.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError), open(self.facts / f"{name}.json", "x") as file:
            json.dump(value, file)


def current() -> Rehearsal | None:
    """Return what this process was told; None outside a rehearsal."""
    return _decoded(text) if (text := os.environ.get(VARIABLE)) else None


@functools.cache
def _decoded(text: str) -> Rehearsal:
    value = json.loads(text)
    return Rehearsal(folder=Path(value["folder"]), facts=Path(value["facts"]), steps=int(value["steps"]))


def listing(folder: Path) -> dict[str, list[int]] | None:
    """Return size and time of change of the files in a folder; None if there is no such folder."""
    if not folder.is_dir():
        return None
    found: dict[str, list[int]] = {}
    for base, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # a live run replaces its files
                status = os.lstat(os.path.join(base, name))
                found[os.path.relpath(os.path.join(base, name), folder)] = [
                    status.st_size,
                    status.st_mtime_ns,
                ]
        if len(found) > MAX_FILES:
            break
    return found
