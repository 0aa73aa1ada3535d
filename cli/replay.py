"""`grpo-run replay RUN --step N`: do a step of a run again, and compare it with what the run has recorded.

Links the newest checkpoint before the step into a folder of its own, launches the recorded command there, and
lets it train to the step (`runtime/features/replay/` ends it). Nothing of the run is written, except this
folder in its run directory, which is removed again. Says what was compared, or the first thing that differs.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from argparse import ArgumentTypeError, Namespace
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from grpo_run.cli.command_parser import CommandParser
from grpo_run.cli.launching.command import parse
from grpo_run.cli.resume import launch_words
from grpo_run.runtime.catalog import find_run
from grpo_run.runtime.checkpoints.digests import verify_digests
from grpo_run.runtime.checkpoints.manifest import MANIFEST
from grpo_run.runtime.checkpoints.search import (
    FoundCheckpoint,
    directories_of_run,
    find_checkpoints,
    place_within,
)
from grpo_run.runtime.errors import EXIT_STOPPED, CheckpointError, UsageError
from grpo_run.runtime.history.events import ResumeChosen, WarningGiven
from grpo_run.runtime.history.history import History
from grpo_run.runtime.history.reader import read_journal
from grpo_run.runtime.history.run_directory import RunDirectory
from grpo_run.runtime.history.step_comparison import CallRecords, Row, changed_rows, compare
from grpo_run.runtime.history.step_records import digest_text
from grpo_run.runtime.launch.imported_files import digests as file_digests
from grpo_run.runtime.launch.imported_files import read_record
from grpo_run.runtime.launch.inputs import Inputs
from grpo_run.runtime.launching.display import LineDisplay
from grpo_run.runtime.launching.reading import run_reader
from grpo_run.runtime.launching.request import RunRequest
from grpo_run.runtime.registry import forget, registry_folder
from grpo_run.runtime.upstream.tracker_names import SWITCHED_OFF

EXIT_DIFFERENT = 1
NOT_AGAIN = frozenset({
    "--inject", "--on-end", "--notify", "--heartbeat-url", "--keep-every",
    "--require-resume", "--resume-from", "--snapshot-every", "--snapshot-dir", "--metrics-addr",
    "--max-restarts", "--run-dir", "--run-id", "--master-port", "--master_port", "--rdzv-endpoint",
    "--rdzv_endpoint", "--rdzv-id", "--rdzv_id", "--log-dir", "--log_dir", "--log-completions",
})  # fmt: skip
"""Options of the run that would make a replay another run, tell somebody, or meet the run itself."""
OWN = ["--snapshot-every", "0", "--snapshot-dir", "off", "--metrics-addr", "off", "--max-restarts", "0"]
WAITS = [
    "--vote-timeout",
    "3600",
    "--deadline-floor",
    "4000",
    "--deadline-first",
    "4000",
    "--deadline-ceiling",
    "4000",
]
"""For a user who looks at a step for up to an hour."""
REFUSED = ("--drop-sample", "--reward-file")
"""Begins what a rank says of a change that it cannot make."""
SHOWN_STEPS = 12
MOST_NAMES = 4


class Quiet(LineDisplay):
    """Keeps what the replay has to say, for the case that it fails."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def notify(self, text: str) -> None:
        """Keep a message."""
        self.said.append(text)

    def rank_line(self, rank: int, descriptor: int, line: str) -> None:
        """The output of ranks is in their files."""


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """A run that is replayed.

    Attributes:
        call: the number of the one that is replayed.
        steps: of this call.
        checkpoints: of its calls that lie on disk, newest step first.
    """

    run: RunDirectory
    fields: dict[str, Any]
    history: History
    call: int
    steps: CallRecords
    checkpoints: tuple[FoundCheckpoint, ...]

    def of_call(self) -> list[FoundCheckpoint]:
        """Return the checkpoints of the call."""
        return [one for one in self.checkpoints if one.manifest.train_call.ordinal == self.call]


def main(arguments: Sequence[str]) -> int:
    """Replay and compare; returns 0 if everything is equal, 1 if something differs."""
    parser = CommandParser(
        prog="grpo-run replay",
        description="Train from the newest checkpoint before a step to this step again, in processes and"
        " folders of its own, and compare with what the run has recorded (see --keep-every of grpo-run"
        " launch).",
    )
    parser.add_run()
    add = parser.add_argument
    add("--step", type=int, required=True, metavar="N", help="the last step to do again")
    add("--rank", type=int, metavar="R", help="compare this rank only (default: all)")
    add("--call", type=int, metavar="N", help="number of the train() call (default: the last one)")
    add("--drop-sample", type=sample_numbers, default=(), metavar="I[,J]",
        help="leave these samples of the step out of the loss, and show what comes of it")  # fmt: skip
    add("--reward-file", metavar="FILE",
        help="in the step, call the functions of a Python file in place of reward functions of the same"
        " names, and show what comes of it")  # fmt: skip
    add("--shell", action="store_true", help="ask for Python when the step begins, on rank R (default: 0)")
    options = parser.parse_args(arguments)
    if options.shell and not os.isatty(0):
        raise UsageError("--shell needs a terminal as standard input")
    run = RunDirectory(path=find_run(options.run).path.resolve())
    recorded = _recorded(run, options.call)
    changes: dict[str, Any] = {}
    if options.drop_sample or options.reward_file:
        step = changes_from(recorded.steps, options.step)
        samples = recorded.steps.samples(step)
        check_numbers(options.drop_sample, samples, step)
        changes = {"changes_from": step, "dropped": options.drop_sample}
        if options.reward_file:
            functions = {name for one in samples.values() for name in one.rewards}
            changes["reward_file"] = reward_file(options.reward_file, functions)
    start = _start(recorded, options.step, changes.get("changes_from", options.step))
    if options.rank is not None and not 0 <= options.rank < start.manifest.world_size:
        raise UsageError(f"--rank {options.rank}: the run has {start.manifest.world_size} rank(s)")
    run.replay.mkdir(mode=0o700, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f"step-{options.step}-", dir=run.replay))
    keep = False
    try:
        code, keep = _replay(recorded, folder, start, options, changes)
    finally:
        forget(folder / "run", registry_folder())
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
            if not any(run.replay.iterdir()):
                run.replay.rmdir()
    return code


def _recorded(run: RunDirectory, call: int | None) -> Recorded:
    """Read a run.

    Args:
        call: that is replayed; None for the last one.

    Raises:
        UsageError: it cannot be launched again.
    """
    fields, history = run.read_run(), run_reader(run).history()
    if fields["typed"] is None:
        raise UsageError(f"the run in {run.path} was launched by a program, not by a command")
    if not Path(fields["working_directory"]).is_dir():
        raise UsageError(
            f"the run in {run.path} was launched in {fields['working_directory']}, which is gone"
        )
    folders = [Path(path) for path in history.calls.output_directories]
    found = find_checkpoints(*directories_of_run(fields["run_id"], *folders))
    own = tuple(one for one in found if one.manifest.run_id == fields["run_id"])
    call = call or history.train_call
    steps = CallRecords.read(run, call)
    return Recorded(run=run, fields=fields, history=history, call=call, steps=steps, checkpoints=own)


def _start(recorded: Recorded, step: int, first: int) -> FoundCheckpoint:
    """Return the newest undamaged checkpoint of the call before a step.

    Args:
        step: the last one that is replayed.
        first: the one before which the checkpoint must be.

    Raises:
        UsageError: there is none, or the run has not reached the step.
    """
    calls, own = recorded.history.calls, recorded.of_call()
    reached = max((one.reached for one in calls if one.ordinal == recorded.call), default=0)
    if step > reached:
        raise UsageError(f"--step {step}: train() call {recorded.call} of the run has reached step {reached}")
    for one in (one for one in own if one.manifest.step < first):
        try:
            verify_digests(one.path, one.manifest.files)
            return one
        except CheckpointError as error:
            print(f"grpo-run: {one.path} is not used: {error}")
    raise UsageError(f"--step {first}: {what_is_there([one.manifest.step for one in own], reached)}")


def what_is_there(steps: Sequence[int], reached: int) -> str:
    """Say which steps can be replayed, and how to keep more."""
    later = sorted({one for one in steps if one < reached})
    how = "launch with --keep-every STEPS to keep checkpoints to replay from"
    if not later:
        return f"no checkpoint before a step of this run is left; {how}"
    names = ", ".join(str(one) for one in later[:SHOWN_STEPS]) + (", …" if len(later) > SHOWN_STEPS else "")
    where = f"steps {later[0] + 1} to {reached} can be replayed, from the checkpoints of steps {names}"
    return f"no undamaged checkpoint before it is left; {where}; {how}"


def _request(recorded: Recorded, folder: Path, end: dict[str, Any]) -> RunRequest:
    """Return the recorded command as a run of its own that ends with a step, as the settings of the feature
    say."""
    from grpo_run.cli.launching.options import OptionWords, build_parser

    typed, splitter, words = list(recorded.fields["typed"]), OptionWords(build_parser()), list[str]()
    rest = launch_words(recorded.run, typed, accept_change=False)
    while option := splitter.next_option(rest):
        if option[0].partition("=")[0] not in NOT_AGAIN:
            words += option
    run_id = recorded.fields["run_id"]  # what is derived from it stays as it was
    own = ["--run-dir", str(folder / "run"), "--run-id", run_id, *OWN, *(WAITS if "terminal" in end else ())]
    request, _ = parse([*words, *own, *rest])
    if request.torchrun.nnodes not in ("1", "1:1"):
        raise UsageError("a run over several hosts cannot be replayed")
    given: Sequence[Any] = request.features
    features = tuple(replace(one, **end) if one.NAME == "replay" else one for one in given)
    began = next((one.time for one in read_journal(recorded.run.journal)), None)
    outputs = made_by_run(recorded.history.calls.output_directories, began or 0.0)
    return replace(
        request,
        arguments=tuple(redirected(word, outputs, folder / "script") for word in request.arguments),
        features=features,
        output_root=folder / "output",
        typed=None,
    )


def made_by_run(outputs: Sequence[str], began: float) -> list[Path]:
    """Return output directories, and the folders around them in which nothing is older than the run.

    Args:
        began: in seconds since the epoch.
    """
    found, here = dict.fromkeys(Path(os.path.realpath(path)) for path in outputs), Path.cwd()
    for output in list(found):
        for folder in output.parents:
            if here.is_relative_to(folder) or _holds_older(folder, began):
                break
            found[folder] = None
    return list(found)


def _holds_older(folder: Path, time: float) -> bool:
    try:
        return any(one.lstat().st_mtime < time for one in folder.iterdir())
    except OSError:
        return True


def redirected(word: str, directories: Sequence[Path], root: Path) -> str:
    """Return an argument of the script that names a folder below `root` if it names one of these."""
    name, sign, value = word.rpartition("=")
    if "\0" in value or not value or (path := Path(os.path.realpath(value))) not in directories:
        return word
    # folders that lie in one another still do
    return f"{name}{sign}{root / path.relative_to('/')}"


def _place(recorded: Recorded, start: FoundCheckpoint, root: Path) -> None:
    """Link the checkpoint, and the ends of earlier calls, to where the calls of the replay find them."""
    for one in recorded.checkpoints:
        ordinal = one.manifest.train_call.ordinal
        if one is start or (one.manifest.finished and ordinal < recorded.call):
            target = root / f"call-{ordinal}" / place_within(one.path)
            for file in (one.path / name for name in (*one.manifest.files, MANIFEST)):
                place = target / file.relative_to(one.path)
                place.parent.mkdir(parents=True, exist_ok=True)
                try:
                    with contextlib.suppress(OSError):  # another file system, or one without links
                        os.link(file, place)
                        continue
                    shutil.copyfile(file, place)
                except OSError as error:
                    raise UsageError(
                        f"{file} cannot be copied ({error.strerror}): repeat the command"
                    ) from error


def _changed_files(recorded: Recorded) -> list[str]:
    """Return the files of the user that have changed since the run."""
    inputs, folder = Inputs.from_json(recorded.fields.get("inputs")), Path.cwd()
    files = {**(inputs.files if inputs else {}), **read_record(recorded.run.imports)}
    now = file_digests(files, folder)
    return [name for name, digest in files.items() if now.get(name) != digest]


def _replay(
    recorded: Recorded, folder: Path, start: FoundCheckpoint, options: Namespace, changes: dict[str, Any]
) -> tuple[int, bool]:
    """Launch, compare and print; return the exit code, and whether the folder is to stay."""
    from grpo_run.runtime.launching.launch import launch

    first, step, call = start.manifest.step, options.step, recorded.call
    os.chdir(recorded.fields["working_directory"])
    inputs = Inputs.from_json(recorded.fields.get("inputs")) or Inputs()
    os.environ.update({**inputs.variables, **SWITCHED_OFF})
    for name in _changed_files(recorded)[:MOST_NAMES]:
        print(f"grpo-run: {name} has changed since the run")
    end: dict[str, Any] = {"train_call": call, "last_step": step, **changes}
    if options.shell:
        end |= {"terminal": os.ttyname(0), "shell_rank": options.rank or 0}
    request = _request(recorded, folder, end)
    _place(recorded, start, folder / "output")
    print(f"grpo-run: replaying steps {first + 1} to {step} from {start.path}", flush=True)
    display = Quiet()
    result = launch(request, display)
    again = RunDirectory(path=folder / "run")
    events = list(read_journal(again.journal))
    resumed = [one.step for one in events if isinstance(one, ResumeChosen) and one.train_call == call]
    refused = [one.text for one in events if isinstance(one, WarningGiven) and one.text.startswith(REFUSED)]
    if refused:
        raise UsageError(refused[0])
    if result.exit_code == EXIT_STOPPED:
        return EXIT_STOPPED, False
    if result.exit_code != 0 or resumed != [first]:
        said = display.said[-3:] if result.exit_code else [f"it did not resume from step {first}"]
        print(f"grpo-run: the replay failed; its files stay in {folder}:", *said, sep="\n  ")
        return result.exit_code or EXIT_DIFFERENT, True
    before, after = recorded.steps, CallRecords.read(again, call)
    changed, saved = changes.get("changes_from"), _saved(recorded, step)
    found = compare(
        before, after, range(first, step + 1), rank=options.rank, saved=saved, changed_from=changed
    )
    if changed is not None:
        if after.rollout_step(step) != changed:
            raise UsageError(f"step {step} generates no samples: name the step in which its samples were")
        check_numbers(options.drop_sample, after.samples(changed), changed)
        print_rows(changed_rows(before, after, step, changed, options.drop_sample))
    if found.first is not None:
        one = found.first
        print(
            f"step {found.step} differs: {one.name}: recorded {one.recorded}, replayed {one.replayed}"
            + (", before the change" if changed is not None else "")
        )
        return EXIT_DIFFERENT, False
    if changed is not None:
        return 0, False
    if found.last > first:
        print(f"step {found.last} is equal: {', '.join(found.said)}")
    if found.last < step:
        raise UsageError(
            f"the run has recorded nothing of step {step} to compare with: launch with --keep-every STEPS"
        )
    return 0, False


def _saved(recorded: Recorded, step: int) -> dict[str, str]:
    """Return the digests of the run's checkpoint of a step by tensor.

    Those of a layout that spreads weights over ranks are not compared.
    """
    from safetensors import safe_open

    from grpo_run.runtime.rank.tensor_digests import digests

    found = {}
    same = [one for one in recorded.of_call() if (one.manifest.step, one.manifest.layout) == (step, "ddp")]
    for file in (file for one in same[:1] for file in one.path.glob("*.safetensors")):
        with safe_open(file, framework="pt") as content:
            for name in content.keys():  # noqa: SIM118 - not a mapping
                found[name] = digest_text(digests([content.get_tensor(name)])[0])
    return found


def changes_from(recorded: CallRecords, step: int) -> int:
    """Return the step whose samples or rewards a replay changes: in which those of the last step were
    generated.

    Raises:
        UsageError: none were.
    """
    found = recorded.rollout_step(step)
    if found is None and recorded.of_step(step):
        raise UsageError(f"step {step} trains on no samples with rewards")
    return found or step


def check_numbers(numbers: Collection[int], samples: Collection[int], step: int) -> None:
    """Raise a UsageError if a step has no sample of one of these numbers; not if nothing of it is known."""
    if samples and (unknown := [one for one in numbers if one not in samples]):
        last = max(samples)
        raise UsageError(f"--drop-sample {unknown[0]}: the samples of step {step} are 0 to {last}")


def sample_numbers(text: str) -> tuple[int, ...]:
    """Return the numbers of `--drop-sample`. Raises ArgumentTypeError."""
    try:
        return tuple(int(one) for one in text.split(","))
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is not a list of numbers, such as 3,5") from None


def reward_file(text: str, functions: Collection[str]) -> str:
    """Return the path of a Python file, from anywhere.

    Args:
        functions: names of the run's reward functions; empty if they are not known.

    Raises:
        UsageError: it cannot be read, or defines none of them.
    """
    path = Path(text).absolute()
    try:
        names = compile(path.read_bytes(), path, "exec").co_names
    except (OSError, SyntaxError, ValueError) as error:
        raise UsageError(f"--reward-file {text}: {getattr(error, 'strerror', None) or error}") from error
    if functions and not set(functions) & set(names):
        listed = ", ".join(sorted(functions))
        raise UsageError(f"--reward-file {text}: defines no reward function of the run ({listed})")
    return str(path)


def print_rows(rows: Iterable[Row]) -> None:
    """Print values of a replay beside those of the run."""
    shown = [
        (name, *(f"{one:.6g}" if isinstance(one, float) else one for one in values)) for name, *values in rows
    ]
    table = [("", "recorded", "replayed"), *shown]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
