"""Finding the script: by its path, or by the name of a module."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from grpo_run.cli.launching.script_file import check_configs, check_output_directory, check_source, source_of
from grpo_run.runtime.errors import UsageError


def test_a_script_is_its_own_source(tmp_path: Path) -> None:
    """The path is returned as given."""
    script = tmp_path / "train.py"
    script.write_text("")
    assert source_of(str(script), module=False) == script


def test_a_module_in_the_working_directory_is_found(here: Path) -> None:
    """`python -m` finds it too."""
    (here / "my_training.py").write_text("")
    assert source_of("my_training", module=True).resolve() == here / "my_training.py"


def test_a_package_is_run_by_its_main_module(here: Path) -> None:
    """As by `python -m package`; a module in a package is found too."""
    (here / "my_package").mkdir()
    for name in ("__init__", "__main__", "grpo"):
        (here / "my_package" / f"{name}.py").write_text("")
    assert source_of("my_package", module=True).name == "__main__.py"
    assert source_of("my_package.grpo", module=True).name == "grpo.py"


def test_finding_a_module_does_not_import_it(here: Path) -> None:
    """The user's package must not run in the launcher."""
    (here / "my_package").mkdir()
    (here / "my_package" / "__init__.py").write_text("raise RuntimeError('imported')")
    (here / "my_package" / "grpo.py").write_text("")
    assert source_of("my_package.grpo", module=True).name == "grpo.py"


@pytest.mark.parametrize(
    "target", ["no_such_module", "my_package", "my_package.absent", "plain.inner", "", ".x"]
)
def test_a_missing_module_is_refused_in_one_line(here: Path, target: str) -> None:
    """Missing, without `__main__`, or inside a module that is not a package."""
    (here / "my_package").mkdir()
    (here / "my_package" / "__init__.py").write_text("")
    (here / "plain.py").write_text("")
    with pytest.raises(UsageError, match="cannot be found"):
        source_of(target, module=True)


def test_a_plain_folder_does_not_hide_an_installed_module(here: Path) -> None:
    """A folder of data with the name of a library is not a package."""
    (here / "json").mkdir()
    assert source_of("json.tool", module=True).name == "tool.py"


@pytest.mark.parametrize(
    ("source", "refused"),
    [
        (b"import os\n\ndef f(:\n    pass\n", "train.py, line 3: SyntaxError: invalid syntax"),
        (b"if True:\nx = 1\n", "train.py, line 2: IndentationError: expected an indented block"),
        (b"x = 1\n\x00y\n", "null bytes"),
        (b"name = '\xff'\n", "train.py, line 1: SyntaxError: "),
        (b"x = " + b"(" * 500 + b")" * 500, "train.py, line 1: "),
    ],
)
def test_what_python_refuses_is_said_with_its_line(here: Path, source: bytes, refused: str) -> None:
    """In one line, without running anything of the script."""
    script = here / "train.py"
    script.write_bytes(source)
    with pytest.raises(UsageError) as caught:
        check_source(script)
    assert refused in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "source", [b"# coding: latin-1\nname = '\xff'\n", b"raise SystemExit(1)\n", b"x = '\\d'\n", b""]
)
def test_what_python_compiles_is_not_run(here: Path, source: bytes, recwarn: pytest.WarningsRecorder) -> None:
    """Also in another encoding, and with what Python warns of: the rank shows that."""
    script = here / "train.py"
    script.write_bytes(source)
    check_source(script)
    assert list(recwarn) == []


def test_a_pipe_is_left_to_the_script(here: Path) -> None:
    """It could be read only once."""
    os.mkfifo(here / "pipe.py")
    check_source(here / "pipe.py")


@pytest.mark.parametrize("words", [["--config", "bad.yaml"], ["--lr", "1", "--config=bad.yaml"]])
def test_a_configuration_that_is_not_yaml_is_named_with_its_line(here: Path, words: list[str]) -> None:
    """Tags that only the script knows, an option without a value and a missing file are left to it."""
    (here / "bad.yaml").write_text("a: [1\nb: 2\n")
    (here / "tags.yaml").write_text("a: !mine [1]\n---\nb: 2\n")
    with pytest.raises(UsageError, match=r"bad\.yaml, line 2, column 2: "):
        check_configs(words)
    check_configs(["--config", "tags.yaml", "--config", "missing.yaml", "bad.yaml", "--config"])


@pytest.mark.parametrize(
    "words", [["--output_dir", "/proc/nope/out"], ["--lr", "1", "--output-dir=/proc/nope"]]
)
def test_an_output_directory_that_cannot_be_written_is_refused(words: list[str]) -> None:
    """With its first part that exists: every save would fail."""
    with pytest.raises(UsageError, match=r"output directory /proc/nope\S* cannot be written: /proc: "):
        check_output_directory(words)


@pytest.mark.parametrize(("free_bytes", "warns"), [(100 << 20, True), (300 << 20, False)])
def test_a_disk_without_room_for_a_checkpoint_is_a_warning(
    here: Path, monkeypatch: pytest.MonkeyPatch, free_bytes: int, warns: bool
) -> None:
    """Before the night; an adapter may still fit."""
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=free_bytes))
    said = check_output_directory(["--output_dir", "new/deep"])
    text = "warning: output directory new/deep has 100 MiB free; make room for checkpoints"
    assert said == ([text] if warns else [])


def test_an_output_directory_is_left_as_it_is(here: Path) -> None:
    """A missing one is not made, and nothing stays in one that exists. An option without a value is left to
    the script.
    """
    (here / "out").mkdir()
    assert check_output_directory(["--output_dir", "out", "--output-dir", "new/deep", "--output_dir"]) == []
    assert sorted(path.name for path in here.iterdir()) == ["out", "train.py"]
    assert list((here / "out").iterdir()) == []
