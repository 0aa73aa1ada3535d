"""What a launch does after each of these changes: the table in `docs/reference/checkpoints.md`, row by row,
by the code that decides.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from support.builders.launch_commands import prepare
from support.identities import identity
from support.journal import event

from grpo_run.runtime.checkpoints.manifest import write_manifest
from grpo_run.runtime.errors import UsageError
from grpo_run.runtime.files import write_json
from grpo_run.runtime.history.history import History
from grpo_run.runtime.history.journal import Journal
from grpo_run.runtime.history.reader import read_journal
from grpo_run.runtime.history.run_directory import RunDirectory
from grpo_run.runtime.launch.imported_files import digests
from grpo_run.runtime.launch.inputs import commit_of
from grpo_run.runtime.launching import _identity as run_identity
from grpo_run.runtime.launching._identity import ChangedFiles, check_against_run, check_inputs, inputs_of

PAGE = Path(__file__).parents[4] / "docs" / "reference" / "checkpoints.md"
CONTINUES, SAID = "continues", "continues, and says so"
ASKED = "refused, names the change; `--accept-change` continues"
OTHER = "another run, which does not touch the first"
REFUSED = "refused"
NOTHING = "nothing to do, code 0"
SAME_CHECKPOINTS = "continues from its checkpoints in `output_dir`, with a record of its own"
COMMAND = ("train.py", "--config", "config.yaml", "--lr", "1")


def edit(patch: pytest.MonkeyPatch, name: str) -> None:
    """Append a line to a file."""
    Path(name).write_text(Path(name).read_text() + "# edited\n")


def variables(patch: pytest.MonkeyPatch, *pairs: str) -> None:
    """Set variables."""
    for pair in pairs:
        patch.setenv(*pair.split("="))


def link(patch: pytest.MonkeyPatch) -> None:
    """Make a link to the script."""
    Path("link.py").symlink_to("train.py")


def move(patch: pytest.MonkeyPatch) -> None:
    """Move the script and what it imports to another directory."""
    Path("moved").mkdir()
    for name in ("train.py", "rewards.py"):
        shutil.move(name, f"moved/{name}")


def elsewhere(patch: pytest.MonkeyPatch) -> None:
    """Enter another working directory, in which the same files lie."""
    shutil.copytree(".", "copy", ignore=shutil.ignore_patterns("runs", "copy"))
    patch.chdir("copy")


def other_torch(patch: pytest.MonkeyPatch) -> None:
    """Another version of a library."""
    collect = run_identity.collect
    patch.setattr(run_identity, "collect", lambda *given: replace(collect(*given), versions={"torch": "9.9"}))


def other_host(patch: pytest.MonkeyPatch) -> None:
    """The next job of a scheduler, on another machine."""
    variables(patch, "HOSTNAME=b", "SLURM_JOB_ID=2", "MASTER_ADDR=b", "USER=other")


def other_run(patch: pytest.MonkeyPatch) -> None:
    """A run of another command, whose id `--resume-from` can name."""
    run = RunDirectory(path=Path("runs/other"))
    run.create()
    run.write_run({"run_id": "other"})


def commit(patch: pytest.MonkeyPatch) -> None:
    """A commit that leaves the files of the run as they are."""
    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "x"]):
        identity = ["-c", "user.name=x", "-c", "user.email=x@example.com"]
        subprocess.run(["git", *identity, *words], check=True, timeout=30)


def nothing(patch: pytest.MonkeyPatch) -> None:
    """The change is in the command."""


CHANGES: dict[str, Callable[..., None]] = {
    change.__name__: change
    for change in (
        edit,
        variables,
        link,
        move,
        elsewhere,
        other_torch,
        other_host,
        other_run,
        commit,
        nothing,
    )
}


@dataclass(frozen=True)
class Row:
    """A change after a run was stopped (or has finished), and what the launch does: a line of the file.

    Attributes:
        words: of the launch after the change.
        make: the function that makes the change, and what it is given.
        code: with which the run has ended.
        launched_with: options of the launch before, or `-`.
    """

    change: str
    outcome: str
    words: str
    make: str
    code: str
    launched_with: str


ROWS = [
    Row(*line.split(" | "))
    for line in Path(__file__).with_name("identity_table.txt").read_text().splitlines()
]


@pytest.fixture
def at_home(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of the run, with a script, a module and a configuration file."""
    for name in ("train.py", "rewards.py", "config.yaml", "notes.py"):
        (here / name).write_text("")
    variables(monkeypatch, "STAGE=1", "SEED=1", "HF_TOKEN=secret", "HOSTNAME=a", "CUDA_VISIBLE_DEVICES=0")
    return here


def recorded(row: Row) -> RunDirectory:
    """Record the run before the change, with two checkpoints."""
    for step in (3, 4):
        path = Path(f"ours/checkpoint-{step}")
        path.mkdir(parents=True)
        (path / "trainer_state.json").write_text("{}")
        write_manifest(path, identity("ours", step, run_id=prepare(COMMAND).config.run_id))
    launch = prepare([*(row.launched_with.split() if row.launched_with != "-" else []), *COMMAND])
    run = RunDirectory(path=launch.config.run_directory)
    run.create()
    run.write_run({**launch.config.as_json(), "inputs": inputs_of(launch.config, launch.script).as_json()})
    write_json(run.imports, digests(["train.py", "rewards.py"], Path.cwd()))
    journal = Journal(run.journal, launch.config.run_id)
    journal.write(event("run_started"))
    journal.write(event("attempt_started", attempt=0, world_size=1, node=0))
    folder = Path("ours").resolve()
    journal.write(
        event("train_started", rank=0, train_call=1, trainer_class="GRPOTrainer", output_dir=str(folder))
    )
    journal.write(event("step_committed", step=5, train_call=1, target_steps=10))
    journal.write(event("checkpoint_published", step=4, train_call=1, path=str(folder / "checkpoint-4")))
    journal.write(event("run_ended", exit_code=int(row.code), sentence=""))
    return run


def decided(words: Sequence[str], run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> str:
    """What a launch with these words does, by the code that decides."""
    before = run.run_json.read_bytes()
    try:
        launch = prepare([word.format(directory=run.path) for word in words])
        directory = RunDirectory(path=launch.config.run_directory)
        history = History.of(read_journal(directory.journal))
        inputs = inputs_of(launch.config, launch.script)
        check_inputs(
            launch.config.run_id, directory, history, inputs, accept_change=launch.options.accept_change
        )
        check_against_run(launch.config, directory, history)
    except UsageError as error:
        return f"{REFUSED}: {error}"
    finally:
        assert run.run_json.read_bytes() == before
    if directory.path != run.path:
        if history.finished or directory.journal.exists():
            return "found a third run"
        # ranks resume from the checkpoints of their run id
        same_id = launch.config.run_id == run.read_run()["run_id"]
        return SAME_CHECKPOINTS if same_id else OTHER
    if history.finished:
        return NOTHING
    said = capsys.readouterr().out
    marks = ("changed since the run began", "has no effect")
    return SAID if any(mark in said for mark in marks) else CONTINUES


@pytest.mark.usefixtures("at_home")
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.change)
def test_each_row_of_the_table_holds(
    row: Row, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--accept-change` continues where a change is asked about; no decision writes to the run's record."""
    run = recorded(row)
    kind, *given = row.make.split()
    CHANGES[kind](monkeypatch, *given)
    outcome = decided(row.words.split(), run, capsys)
    if row.outcome != ASKED:
        assert outcome.partition(":")[0] == row.outcome, outcome
        return
    assert outcome.startswith(REFUSED), outcome
    assert "--accept-change" in outcome
    assert "secret" not in outcome
    assert decided(["--accept-change", *row.words.split()], run, capsys) == SAID


def test_the_table_in_the_documentation_is_this_one() -> None:
    """Row by row, in this order."""
    section = (
        PAGE.read_text(encoding="utf-8").partition("## What a launch continues")[2].partition("\n## ")[0]
    )
    rows = re.findall(r"^\| (.*?) \| (.*?) \|$", section, flags=re.MULTILINE)
    assert rows[1:] == [(row.change, row.outcome) for row in ROWS]


@pytest.mark.usefixtures("at_home")
def test_a_file_that_is_edited_during_a_run_is_named_before_the_next_attempt() -> None:
    """Once; the restart is not refused."""
    launch = prepare(COMMAND)
    run = RunDirectory(path=launch.config.run_directory)
    run.create()
    changed = ChangedFiles(run, inputs_of(launch.config, launch.script))
    assert changed.since_last_attempt() is None
    write_json(run.imports, digests(["train.py", "rewards.py"], Path.cwd()))
    Path("rewards.py").write_text("x = 1\n")
    assert changed.since_last_attempt() == "changed since the last attempt: rewards.py was edited"
    assert changed.since_last_attempt() is None


def test_the_commit_is_known_and_marked_if_files_have_changed(
    at_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outside a repository there is none."""
    assert commit_of(at_home) is None
    commit(monkeypatch)
    clean = commit_of(at_home)
    assert clean is not None
    assert re.fullmatch(r"[0-9a-f]{40}", clean)
    subprocess.run(["git", "add", "train.py"], check=True, timeout=30)
    assert commit_of(at_home) == f"{clean}-dirty"
    monkeypatch.setenv("PATH", os.devnull)
    assert commit_of(at_home) is None


@pytest.mark.usefixtures("at_home")
def test_a_finished_run_is_refused_only_if_the_checkpoint_that_it_named_is_gone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A script that deletes its checkpoints before its last line has finished, as often as it is launched."""
    run = recorded(next(row for row in ROWS if row.code == "0"))
    shutil.rmtree("ours")
    assert decided(COMMAND, run, capsys) == NOTHING
    journal = Journal(run.journal, run.read_run()["run_id"])
    place = Path("ours/checkpoint-4").resolve()
    journal.write(
        event("run_ended", exit_code=0, sentence=f"Finished at step 5 of 10. Last checkpoint: {place}.")
    )
    assert f"{place} is gone; use --fresh" in decided(COMMAND, run, capsys)
