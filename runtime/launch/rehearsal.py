"""What a rank of a rehearsal is told: where it writes, and which server it may change; and how far calls go.

`grpo-run rehearse` starts launches with this in one environment variable. A rank maps each output directory
that the script names to a directory of the rehearsal's, and notes what is in the real one before anything is
written, so that the rehearsal can tell afterwards whether the script has also written there. Used by
`runtime/rehearsal/`, by the choice of a checkpoint, by loops, and by the features `rehearsal` and
`rollout_server`. Other runs do not have the variable.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from grpo_run.runtime.errors import ConfigError

VARIABLE = "GRPO_RUN_REHEARSAL"
SAVE_EVERY = 2
"""At least so many steps lie between the checkpoints of a rehearsal whose script saves any."""
FIRST_FAULT_STEP = 5
"""No fault comes before: two checkpoints do."""
STEPS_AFTER = 3
"""At least so many follow a fault: a stop is agreed in two."""
MOST_STEPS = 24
"""Enough for a whole generation batch of 8 steps before and after the one with the fault."""
MAX_FILES = 20_000
"""Of a real output directory that are compared."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """How far a call goes.

    Attributes:
        steps: its optimizer steps.
        rollout_step: first step of the generation batch that the fault hits.
        fault_step: in the middle of that batch, which is neither the first nor the last one.
        save_every: steps between checkpoints, if the script saves any.
    """

    steps: int
    rollout_step: int
    fault_step: int
    save_every: int

    @classmethod
    def of(cls, batch_steps: int = 1) -> Span:
        """Return that of a call whose generation batches last so many steps. If they are too long, the first
        one is hit, and the call ends before the last one is whole.
        """
        middle, latest = batch_steps // 2 + 1, MOST_STEPS - STEPS_AFTER
        before = max(1, math.ceil((FIRST_FAULT_STEP - middle) / batch_steps))
        if before * batch_steps + middle > latest:
            before = 0
        fault_step = min(before * batch_steps + middle, latest)
        steps = max(fault_step + STEPS_AFTER, (before + 2) * batch_steps)
        return cls(
            steps=min(steps, MOST_STEPS), rollout_step=before * batch_steps + 1, fault_step=fault_step,
            save_every=max(SAVE_EVERY, (fault_step - 1) // 2),
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """One run of a rehearsal.

    Attributes:
        folder: of this run; its outputs and what its ranks note are there.
        facts: what all runs of the rehearsal note about the real job.
        free_server: address of a rollout server that no other run uses; "" for none.
        tool_hangs: whether one call of an agent's tool never returns.
        steps: at most so many optimizer steps of each call; 0 for what its generation batches need.
    """

    folder: Path
    facts: Path
    free_server: str = ""
    tool_hangs: bool = False
    steps: int = 0

    @property
    def variable(self) -> dict[str, str]:
        """The environment variable that carries this."""
        return {VARIABLE: json.dumps(vars(self), default=str)}

    @property
    def outputs(self) -> Path:
        """The folder of all output directories."""
        return self.folder / "output"

    @property
    def traces(self) -> Path:
        """The folder of what ranks note."""
        return self.folder / "traces"

    def span(self, args: Any = None) -> Span:
        """Return how far a call goes.

        Args:
            args: of its trainer; None for a loop.
        """
        passes = getattr(args, "steps_per_generation", None) or 1
        passes *= getattr(args, "num_iterations", 1)
        span = Span.of(math.ceil(passes / getattr(args, "gradient_accumulation_steps", 1)))
        return replace(span, steps=self.steps, save_every=SAVE_EVERY) if self.steps else span

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

    def check_server(self, address: str) -> None:
        """Let a trainer send its weights to a server that the run has not started only if no other uses it.

        Raises:
            ConfigError: it is not known to be free.
        """
        if address.rstrip("/") != self.free_server.rstrip("/"):
            self.note("foreign-server", address)
            raise ConfigError(f"a rehearsal does not change {address}, which this run has not started")

    def first(self, name: str) -> bool:
        """Whether nobody in this run has asked for this name before."""
        with suppress(FileExistsError), open(self.folder / name, "x"):
            return True
        return False

    def note(self, name: str, value: Any) -> None:
        """Write a fact about the real job, unless a rank has done so before."""
        self.facts.mkdir(parents=True, exist_ok=True)
        whole = self.facts / f"{name}-{os.getpid()}"  # the rehearsal reads while ranks write
        whole.write_text(json.dumps(value))
        with suppress(FileExistsError):
            os.link(whole, self.facts / f"{name}.json")
        whole.unlink()


def current() -> Rehearsal | None:
    """Return what this process was told; None outside a rehearsal."""
    return _decoded(text) if (text := os.environ.get(VARIABLE)) else None


@functools.cache
def _decoded(text: str) -> Rehearsal:
    value = json.loads(text)
    return Rehearsal(**{**value, "folder": Path(value["folder"]), "facts": Path(value["facts"])})


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
