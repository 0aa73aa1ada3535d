"""Finding the script, and the environment variables that its source sets."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_run.runtime.errors import UsageError
from grpo_run.runtime.launch.script import source_of
from grpo_run.runtime.launch.sources import local_modules, parsed, read_at_import, variables_set

WAYS = {
    "assignment": 'os.environ["HF_HOME"] = "x"',
    "bare name": 'environ["HF_HOME"] = "x"',
    "two at once": 'os.environ["HF_HOME"], other = "x", 1',
    "chained": 'a = os.environ["HF_HOME"] = "x"',
    "augmented": 'os.environ["HF_HOME"] += "x"',
    "annotated": 'os.environ["HF_HOME"]: str = "x"',
    "deleted": 'del os.environ["HF_HOME"]',
    "setdefault": 'os.environ.setdefault("HF_HOME", "x")',
    "pop": 'os.environ.pop("HF_HOME", None)',
    "update with keywords": 'os.environ.update(HF_HOME="x")',
    "update with a dictionary": 'os.environ.update({"HF_HOME": "x"})',
    "update with dict()": 'os.environ.update(dict(HF_HOME="x"))',
    "merged": 'os.environ |= {"HF_HOME": "x"}',
    "putenv": 'os.putenv("HF_HOME", "x")',
    "bare putenv": 'putenv("HF_HOME", "x")',
    "unsetenv": 'os.unsetenv("HF_HOME")',
    "in a function": 'def main():\n    if True:\n        os.environ["HF_HOME"] = "x"',
}
NO_WAYS = {
    "reading": 'print(os.environ["HF_HOME"], os.environ.get("HF_HOME"))',
    "another mapping": 'settings["HF_HOME"] = "x"',
    "another mapping's update": 'settings.update(HF_HOME="x")',
    "a comment": '# os.environ["HF_HOME"] = "x"',
    "a text": 'text = \'os.environ["HF_HOME"] = "x"\'',
    "a computed name": 'os.environ[name] = "x"',
}


def set_too_late(script: Path) -> set[str]:
    """The variables that the script sets and that libraries read at import."""
    return {name for name in variables_set(local_modules(script)[0].nodes) if read_at_import(name)}


@pytest.mark.parametrize("way", sorted(WAYS))
def test_every_usual_assignment_is_found(way: str) -> None:
    """Each requires a fresh interpreter."""
    assert variables_set(parsed(WAYS[way])) == {"HF_HOME"}


@pytest.mark.parametrize("way", sorted(NO_WAYS))
def test_reads_are_not_taken_for_assignments(way: str) -> None:
    """A fresh interpreter costs seconds at every restart."""
    assert variables_set(parsed(NO_WAYS[way])) == set()


@pytest.mark.parametrize("source", ["def (", "print 'python 2'", "\0", ""])
def test_a_syntax_error_yields_no_variables(source: str) -> None:
    """Python reports the error when it runs the script."""
    assert variables_set(parsed(source)) == set()


@pytest.mark.parametrize(
    "name",
    [
        "HF_HOME",
        "HF_HUB_OFFLINE",
        "TRANSFORMERS_OFFLINE",
        "OMP_NUM_THREADS",
        "CUDA_VISIBLE_DEVICES",
        "PYTORCH_CUDA_ALLOC_CONF",
    ],
)
def test_variables_read_at_import_need_a_fresh_interpreter(tmp_path: Path, name: str) -> None:
    """The warm interpreter has read them already."""
    script = tmp_path / "train.py"
    script.write_text(f'import os\nos.environ["{name}"] = "1"\n')
    assert set_too_late(script) == {name}


@pytest.mark.parametrize(
    "name",
    [
        "WANDB_PROJECT", "MY_SETTING", "TOKENIZERS_PARALLELISM", "PATH", "HF_HUB_ENABLE_HF_TRANSFER", "HF_XET_HIGH_PERFORMANCE",
        "PYTHONPATH",
    ],
)  # fmt: skip
def test_other_variables_do_not_need_a_fresh_interpreter(tmp_path: Path, name: str) -> None:
    """No library has read them, or what it has read makes no difference."""
    script = tmp_path / "train.py"
    script.write_text(f'import os\nos.environ["{name}"] = "1"\n')
    assert set_too_late(script) == set()


def test_a_script_that_is_not_utf8_is_read(tmp_path: Path) -> None:
    """A comment in another encoding hides no assignment."""
    script = tmp_path / "train.py"
    script.write_bytes(b'# -*- coding: latin-1 -*-\n# \xfcber\nimport os\nos.environ["HF_HOME"] = "x"\n')
    assert set_too_late(script) == {"HF_HOME"}


def test_a_script_is_its_own_source(tmp_path: Path) -> None:
    """The path is returned as given."""
    script = tmp_path / "train.py"
    script.write_text("")
    assert source_of(str(script), module=False) == script


@pytest.mark.parametrize(("target", "why"), [("missing.py", "does not exist"), (".", "is a directory")])
def test_a_missing_script_is_refused_in_one_line(target: str, why: str) -> None:
    """The line says why and mentions -m."""
    with pytest.raises(UsageError, match=rf"{target} {why}.*-m"):
        source_of(target, module=False)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory that is not on `sys.path`, as for an installed command."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


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
