"""`grpo-run checkpoints`: list, verify, prune."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from support import checkpoint_files as made
from support.identities import identity

from grpo_run.cli.checkpoints import size
from grpo_run.cli.main import main
from grpo_run.runtime.checkpoints.manifest import write_manifest
from grpo_run.runtime.checkpoints.publishing import partial_directory, reject_checkpoint
from grpo_run.runtime.checkpoints.search import find_checkpoints
from grpo_run.runtime.record.journal import Journal
from grpo_run.runtime.record.run_directory import RunDirectory

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def out(here: Path) -> Path:
    """An output directory with four checkpoints of one run, in the working directory."""
    for step in (10, 20, 30, 40):
        publish(here / "out", step)
    return here / "out"


def publish(folder: Path, step: int, run_id: str = "night") -> Path:
    """One of ours, on two ranks."""
    path = made.plain(folder, step)
    write_manifest(path, identity(folder, step, run_id=run_id, world_size=2))
    return path


def flip(path: Path) -> None:
    """One bit of the weights."""
    file = path / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def as_json(capsys: Captured, *words: str) -> tuple[int, dict[str, Any]]:
    """A command's exit code and object."""
    code = main(["checkpoints", *words, "--json"])
    value: dict[str, Any] = json.loads(capsys.readouterr().out)
    return code, value


def test_a_list_has_a_line_each(out: Path, capsys: Captured) -> None:
    """Newest first, with ranks, run, state and name."""
    made.plain(out, 50)
    assert main(["checkpoints", "list", "out"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:]] == [f"checkpoint-{step}" for step in (50, 40, 30, 20, 10)]
    assert "complete" in lines[2]
    assert {"40", "2", "yes", "night", "published"} <= set(lines[3].split())


def test_the_object_has_every_field(out: Path, capsys: Captured) -> None:
    """And nothing else is printed."""
    code, value = as_json(capsys, "list", "out")
    assert code == 0
    assert [one["step"] for one in value["checkpoints"]] == [40, 30, 20, 10]
    assert {"path", "step", "state", "when", "size_bytes", "ranks", "scheduled", "run", "verified"} <= set(
        value["checkpoints"][0]
    )


def test_a_run_is_known_by_its_id(out: Path, here: Path, capsys: Captured) -> None:
    """Or its directory, or by being the newest: its journal says where its checkpoints are."""
    directory = RunDirectory(path=here / "runs" / "night")
    directory.create()
    directory.write_run({"run_id": "night"})
    with pytest.raises(SystemExit):
        main(["checkpoints"])
    capsys.readouterr()
    assert main(["checkpoints", "list", "night"]) == 2
    assert "published no checkpoint" in capsys.readouterr().err
    journal = Journal(directory.journal, "night")
    journal.write("checkpoint_published", step=40, path=str(out / "checkpoint-40"))
    journal.close()
    for words in (["night"], ["runs/night"], []):
        code, value = as_json(capsys, "list", *words)
        assert (code, len(value["checkpoints"])) == (0, 4)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    "words", [["list", "nowhere"], ["list"], ["verify", "."], ["prune", "out", "--keep", "0"]]
)
def test_nothing_to_look_at_is_one_line_and_2(capsys: Captured, words: list[str]) -> None:
    """Nothing on standard output."""
    os.mkdir("out")
    assert main(["checkpoints", *words]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1


def test_all_sound_is_0(out: Path, capsys: Captured) -> None:
    """One checkpoint alone, or all of a directory; what lies aside is not asked."""
    reject_checkpoint(made.plain(out, 60), "bad")
    assert main(["checkpoints", "verify", "out"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "4 of 4 good"
    assert main(["checkpoints", "verify", "out/checkpoint-20"]) == 0
    assert "verified" in capsys.readouterr().out


def test_a_flipped_bit_is_1_and_named(out: Path, capsys: Captured) -> None:
    """Which file of which checkpoint, and how it differs; the others are looked at all the same."""
    flip(out / "checkpoint-30")
    assert main(["checkpoints", "verify", "out"]) == 1
    shown = capsys.readouterr().out
    (line,) = [line for line in shown.splitlines() if "damaged" in line]
    assert "checkpoint-30/model.safetensors does not match its digest" in line
    assert "3 of 4 good" in shown
    code, value = as_json(capsys, "verify", "out")
    assert (code, value["bad"]) == (1, 1)


def test_a_half_written_one_is_1(out: Path, capsys: Captured) -> None:
    """What lacks is named."""
    (made.plain(out, 50) / "scheduler.pt").unlink()
    assert main(["checkpoints", "verify", "out"]) == 1
    assert "scheduler.pt is missing" in capsys.readouterr().out


def test_prune_shows_first(out: Path, capsys: Captured) -> None:
    """And deletes nothing."""
    assert main(["checkpoints", "prune", "out"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("would delete") == 2
    assert "--yes" in shown
    assert len(os.listdir(out)) == 4


def test_prune_keeps_the_newest_verified(out: Path, capsys: Captured) -> None:
    """A damaged one does not count, and is not touched; nor is one without a manifest."""
    flip(out / "checkpoint-40")
    made.plain(out, 5)
    assert main(["checkpoints", "prune", "out", "--keep", "1", "--yes"]) == 0
    assert sorted(os.listdir(out)) == ["checkpoint-30", "checkpoint-40", "checkpoint-5"]
    capsys.readouterr()
    code, value = as_json(capsys, "prune", "out", "--keep", "1", "--yes")
    assert (code, value["deleted"]) == (0, [])


def test_prune_keeps_the_best(out: Path, capsys: Captured) -> None:
    """As the newest trainer state names it."""
    path = publish_with_best(out, 50, best="out/checkpoint-10")
    assert main(["checkpoints", "prune", "out", "--keep", "1", "--yes"]) == 0
    assert sorted(os.listdir(out)) == ["checkpoint-10", path.name]


def publish_with_best(folder: Path, step: int, best: str) -> Path:
    """One whose trainer knows an older best one."""
    path = made.plain(folder, step)
    (path / "trainer_state.json").write_text(json.dumps({"global_step": step, "best_model_checkpoint": best}))
    write_manifest(path, identity(folder, step, run_id="night", world_size=2))
    return path


def test_what_lies_aside_goes_only_when_asked(out: Path, capsys: Captured) -> None:
    """Rejected, and partial ones that nobody writes any more; another run's replaced one stays."""
    reject_checkpoint(made.plain(out, 50), "bad")
    os.rename(made.plain(out, 60), out / ".checkpoint-60.partial-00ff")
    os.rename(publish(out, 70, run_id="other"), out / "replaced-checkpoint-70")
    main(["checkpoints", "prune", "out", "--keep", "4", "--yes"])
    assert len(os.listdir(out)) == 7
    with partial_directory(out, 80) as busy:
        assert main(["checkpoints", "prune", "out", "--keep", "4", "--yes", "--rejected"]) == 0
        assert busy.is_dir()
    assert sorted(os.listdir(out)) == [
        *(f"checkpoint-{step}" for step in (10, 20, 30, 40)),
        "replaced-checkpoint-70",
    ]


def test_what_cannot_be_deleted_is_1(out: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    """And is no checkpoint any more, as half of it may be gone."""

    def refuse(path: Path) -> None:
        raise OSError(16, "Device or resource busy")

    monkeypatch.setattr("grpo_run.cli.checkpoints.shutil.rmtree", refuse)
    assert main(["checkpoints", "prune", "out", "--keep", "3", "--yes"]) == 1
    assert "could not delete" in capsys.readouterr().out
    assert [found.manifest.step for found in find_checkpoints(out)] == [40, 30, 20]


def test_one_checkpoint_is_not_pruned(out: Path, capsys: Captured) -> None:
    """Its directory is."""
    assert main(["checkpoints", "prune", "out/checkpoint-10"]) == 2
    assert "give its directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 << 40, "3.0 TiB")]
)
def test_sizes_are_readable(count: int, text: str) -> None:
    """In binary units."""
    assert size(count) == text
