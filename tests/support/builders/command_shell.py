"""A working directory and `grpo-run` in it: the shell of transcripts of commands.

Lines of standard error begin with `! `. Ids of runs are lettered in the order in which they are shown.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from grpo_run.cli import train
from grpo_run.cli.launching.options import OptionWords
from grpo_run.cli.launching.options import build_parser as launch_parser
from grpo_run.cli.main import main
from grpo_run.cli.planning import script
from grpo_run.cli.planning.options import build_parser
from grpo_run.cli.planning.requested_job import job_of
from grpo_run.cli.planning.sources import JobSource
from grpo_run.runtime.board.board import Board
from grpo_run.runtime.checkpoints.manifest import write_manifest
from grpo_run.runtime.checkpoints.publishing import partial_directory, reject_checkpoint
from grpo_run.runtime.errors import UsageError
from grpo_run.runtime.features import modules
from grpo_run.runtime.history.journal import Journal
from grpo_run.runtime.history.run_directory import RunDirectory
from grpo_run.runtime.launching._configuration import PreparedLaunch
from grpo_run.runtime.launching.request import RunResult
from grpo_run.runtime.planning.job import Job
from grpo_run.runtime.registry import register, registry_folder
from grpo_run.runtime.upstream import versions
from support import checkpoint_files
from support.builders.launch_commands import prepare
from support.identities import identity
from support.incidents import write_incident
from support.journal import event

SHAPE = "layers=2,hidden=64,heads=4,kv-heads=2,intermediate=176,vocabulary=1000"


def value_of(text: str) -> Any:
    """A word as JSON, or else as a text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _at(value: Any, way: str) -> Any:
    """Return what is at the end of a way of attributes and keys."""
    return functools.reduce(
        lambda one, name: one[name] if isinstance(one, dict) else getattr(one, name), way.split("."), value
    )


def leaves(value: Any, way: str = "") -> Iterator[tuple[str, Any]]:
    """The values inside an object, with the way to each."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in pairs:
        yield from leaves(inner, f"{way}.{key}".lstrip("."))
    if not pairs:
        yield way, value


class CommandShell:
    """Commands in a directory that has `train.py` in it, and what they show."""

    def __init__(self, here: Path, patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.here, self.patch, self.capsys = here, patch, capsys
        self.ids: dict[str, str] = {}
        self.open = ExitStack()
        patch.setenv("XDG_STATE_HOME", str(here / "state"))
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("COLUMNS", "80")

    def shown(self, *lines: object) -> str:
        """What was printed, and these lines; without what differs from machine to machine."""
        printed = self.capsys.readouterr()
        found = [*printed.out.splitlines(), *(f"! {line}" for line in printed.err.splitlines())]
        text = "\n".join(line for line in [*found, *map(str, lines)] if line.strip())
        text = re.sub(r"x{99,}", "xxx…", text.replace(str(self.here), "HERE"))
        text = re.sub(r"\d\d\d\d-\d\d-\d\d[ T]\d\d:\d\d(:\d\d)?", "DATE", text)
        text = re.sub(r"(?s)(torchrun's options:\n).*(exit codes:)", r"\1  …\n\2", text)  # torch's own
        text = re.sub(r"\bpytest [\d.]+", "pytest N", text)
        text = re.sub(r"partial-[0-9a-f]{8}", "partial-RANDOM", re.sub(r"\b1[6-9]\d{8}\.\d+", "TIME", text))
        text = re.sub(r"(identifier: \w+)\..*", r"\1…", re.sub(r"size_bytes \d+", "size_bytes SIZE", text))
        text = re.sub(r"\b(goodput +)[\d.]+", r"\1SHARE", text)
        text = re.sub(r"(/proc: |/proc/\w+: cannot be written: ).*", r"\1…", text)  # root or not
        text = re.sub(r"\(choose from [^)]*\)", lambda found: found[0].replace("'", ""), text)
        text = re.sub(rf"\b{os.getpid()}\b", "PID", text)

        def letter(found: re.Match[str]) -> str:
            return self.ids.setdefault(found[0], f"{found[1] or ''}{chr(ord('A') + len(self.ids))}")

        return re.sub(r"\b(train-|arithmetic-)[0-9a-f]{6}\b|(?<=[0-9A-Za-z]-)()[0-9a-f]{8}\b", letter, text)

    def grpo(self, text: str) -> str:
        """Run `grpo-run` with these words."""
        try:
            code = main(shlex.split(text.replace("SHAPE", SHAPE).replace("LONG", "x" * 5000)))
        except SystemExit as end:  # after a help
            code = int(end.code or 0)
        return self.shown(*[f"exit code {code}"] * bool(code))

    def json(self, text: str) -> str:
        """The same with `--json`: the object, one line for each value."""
        code = main([*shlex.split(text), "--json"])
        value = json.loads(self.capsys.readouterr().out)
        return self.shown(
            *[f"exit code {code}"] * bool(code), *(f"{way} {json.dumps(one)}" for way, one in leaves(value))
        )

    def parse(self, text: str, *names: str) -> str:
        """Parse a command of `launch`; show these fields."""
        try:
            made = prepare(shlex.split(text))
        except UsageError as error:
            return self.shown(f"refused: {error}")
        found = {name: _at(made, name) for name in names}
        if "config.environment" in found:
            found["config.environment"] = dict(found["config.environment"].items() - os.environ.items())
        return self.shown(*(f"{name} {one}" for name, one in found.items()))

    def job(self, settings: str, text: str = "", algorithm: str = "grpo") -> str:
        """The fields of the job that `plan` makes of a script's settings and these options."""
        source = JobSource(settings=json.loads(settings), algorithm=algorithm)
        try:
            job = job_of(build_parser().parse_args(["train.py", *shlex.split(text)]), source)
        except UsageError as error:
            return self.shown(f"refused: {error}")
        names = [*(one.name for one in fields(job)), "generates", "scored", "lengths"]
        usual = Job(batch=8, prompt=256, completion=512)
        changed = {name: getattr(job, name) for name in names if getattr(job, name) != getattr(usual, name)}
        return self.shown(" ".join(f"{name}={one!r}" for name, one in changed.items()) or "the usual job")

    def record(self, text: str, code: str = "") -> str:
        """Let the run of this command exist, and end with this code; show its id."""
        config = prepare(shlex.split(text)).config
        run = RunDirectory(path=config.run_directory)
        run.create()
        run.write_run(config.as_json())
        if code:
            journal = Journal(run.journal, config.run_id)
            journal.write(event("run_started"))
            journal.write(event("run_ended", exit_code=int(code), sentence=""))
        return self.shown(config.run_id)

    def run(self, path: str = "runs/night", **given: str) -> None:
        """Make a run directory."""
        run = RunDirectory(path=self.here / path)
        run.create()
        values = {name: value_of(text.replace("HERE", str(self.here))) for name, text in given.items()}
        run.write_run({"run_id": run.path.name, **values})

    def incident(self, **changes: str) -> None:
        """Write an incident of the run `night`, as the supervisor does; the changes are its verdict's."""
        write_incident(self.here, **{name: value_of(text) for name, text in changes.items()})

    def lock(self, path: str = "runs/night") -> None:
        """Let this process supervise a run."""
        RunDirectory(path=self.here / path).acquire()

    def event(self, name: str, run: str = "runs/night", attempt: str = "0", **given: str) -> None:
        """Write an event to a run's journal."""
        modules("events")  # those of features are known once they are imported
        journal = Journal(self.here / run / "journal.jsonl", Path(run).name)
        journal.attempt = int(attempt)
        values = {key: value_of(text.replace("HERE", str(self.here))) for key, text in given.items()}
        journal.write(event(name, **values))

    def checkpoint(self, folder: str, step: str, *steps: str, run_id: str = "night", best: str = "") -> None:
        """Publish checkpoints of two ranks."""
        for number in map(int, (step, *steps)):
            path = checkpoint_files.plain(self.here / folder, number)
            if best:
                state = {"global_step": number, "best_model_checkpoint": best}
                (path / "trainer_state.json").write_text(json.dumps(state))
            write_manifest(path, identity(folder, number, run_id=run_id, world_size=2))

    def plain(self, folder: str, step: str, renamed: str = "") -> None:
        """Write a checkpoint of transformers; rejected, half written by this process, or renamed."""
        path = checkpoint_files.plain(self.here / folder, int(step))
        if renamed == "rejected":
            reject_checkpoint(path, "bad")
        elif renamed == "partial":
            self.open.enter_context(partial_directory(self.here / folder, int(step)))
            shutil.rmtree(path)
        elif renamed:
            path.rename(path.with_name(renamed))

    def flip(self, path: str) -> None:
        """Flip one bit of a checkpoint's weights."""
        file = self.here / path / "model.safetensors"
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)

    def remove(self, path: str) -> None:
        """Remove a file."""
        (self.here / path).unlink()

    def rename(self, path: str, new: str) -> None:
        """Rename a file or folder."""
        (self.here / path).rename(self.here / new)

    def undeletable(self) -> None:
        """Let no folder be deleted."""

        def refuse(path: Path) -> None:
            raise OSError(16, "Device or resource busy")

        self.patch.setattr("shutil.rmtree", refuse)

    def train(self, text: str, *guards: str) -> str:
        """What `train` passes to `launch`, on a machine with GPUs, with guards of the recipe."""
        self.patch.setattr(train, "_default_ranks", lambda: "gpu")
        words = OptionWords(launch_parser(), extra=("--set",))
        try:
            found = train.split(shlex.split(text), words)
        except UsageError as error:
            return self.shown(f"refused: {error}")
        made = train.launch_arguments(*found, guards=[guard.removeprefix("--") for guard in guards])
        return self.shown(found, shlex.join(made))

    def without(self, name: str) -> None:
        """Let a package be missing."""
        self.patch.setitem(sys.modules, name, None)

    def untested(self) -> None:
        """Let the installed pytest be a version that was not tested."""
        self.patch.setattr(versions, "TESTED", {"pytest": ("0.1", "0.1")})

    def board(self) -> None:
        """Create the board of the run."""
        Board.create(RunDirectory(path=self.here / "runs/night").board, 1)

    def requests(self) -> str:
        """Whether a stop is requested, and how many checkpoints."""
        return str(Board.open(RunDirectory(path=self.here / "runs/night").board).requests)

    def supervised(self) -> None:
        """Let each run end with 75 where it would be supervised."""

        def supervise(made: PreparedLaunch, directory: RunDirectory, *rest: Any) -> RunResult:
            print("supervised in", directory.path, "by", directory.owner())
            run_id = made.config.run_id
            return RunResult(
                exit_code=75, state="stopped", sentence="", run_id=run_id, run_directory=directory.path
            )

        self.patch.setattr("grpo_run.runtime.launching._supervise.supervise", supervise)

    def hurry(self) -> None:
        """Give a script that is planned two seconds."""
        self.patch.setattr(script, "MAX_SECONDS", 2)

    def file(self, path: str, content: str = "") -> None:
        r"""Write a file; `\n` is a line's end."""
        (self.here / path).parent.mkdir(parents=True, exist_ok=True)
        (self.here / path).write_bytes(content.encode("latin-1").decode("unicode_escape").encode("latin-1"))

    def folder(self, path: str) -> None:
        """Make a folder."""
        (self.here / path).mkdir(parents=True)

    def variable(self, name: str, value: str) -> None:
        """Set a variable of the environment."""
        self.patch.setenv(name, value)

    def register(self, path: str) -> None:
        """Enter a run in the user's registry."""
        register(self.here / path, registry_folder())

    def page(self, path: str, text: str) -> str:
        """The mode of a file, whether it is small, and the number of its lines that have a text."""
        file = self.here / path
        page = file.read_text()
        size, found = (
            "small" if len(page) < 100_000 else "large",
            sum(text in one for one in page.splitlines()),
        )
        return f"mode {file.stat().st_mode & 0o777:o}, {size}, in {found} lines"

    def names(self, path: str = ".") -> str:
        """The names in a folder."""
        return self.shown(" ".join(sorted(os.listdir(self.here / path))))
