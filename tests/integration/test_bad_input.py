"""Invalid input prints one line and exits with 2, before any process is started."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from support.runs import BIN, CONFIGS, SCRIPTS

from grpo_run.cli.main import main


@pytest.fixture
def refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Run a command in the test's folder, check that it is refused with code 2, and return its one line."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str, cold: bool = False) -> str:
        if cold:
            answer = subprocess.run(
                [str(BIN / "grpo-run"), *words], capture_output=True, text=True, timeout=60
            )
            code, printed, errors = answer.returncode, answer.stdout, answer.stderr
        else:
            capfd.readouterr()
            try:
                code = main(words)
            except SystemExit as error:
                code = int(error.code or 0)
            printed, errors = capfd.readouterr()
        assert code == 2, (printed, errors)
        lines = errors.strip().splitlines()
        assert len(lines) == 1, errors
        assert lines[0].startswith("grpo-run: ")
        assert "Traceback" not in printed
        return lines[0]

    return run


CASES = [
    (("launch", "nowhere.py"), ("nowhere.py", "does not exist")),
    (("launch", "--nproc-per-node", "many", str(SCRIPTS / "sft.py")), ("--nproc-per-node many",)),
    (("launch", "--nnodes", "two", str(SCRIPTS / "sft.py")), ("--nnodes two",)),
    (("launch", "--run-dir", "/proc/nowhere", str(SCRIPTS / "sft.py")), ("/proc/nowhere", "--run-dir")),
    (("launch", "--metrics-addr", "here", str(SCRIPTS / "sft.py")), ("here",)),
    (
        ("launch", "--accelerate-config", str(CONFIGS / "fsdp2.yaml"), str(SCRIPTS / "sft.py")),
        ("fsdp2.yaml", "DDP"),
    ),
    (("train", "arithmatic"), ("arithmatic", "arithmetic")),
    (("train", "--nproc-per-node", "2", "arithmatic"), ("arithmatic", "arithmetic")),
    (("launch", "--show-ranks", "7", str(SCRIPTS / "sft.py")), ("--show-ranks 7", "only rank is 0")),
    (("demo", "--out", "/proc/x"), ("--out /proc/x",)),
    (("lunch",), ("lunch", "launch")),
    (("status", "nowhere"), ("nowhere", "run.json")),
    (("stop", "nowhere"), ("nowhere", "run.json")),
]


COLD = [("launch", "nowhere.py"), ("train", "arithmatic"), ("lunch",)]
"""Run as a command in a new process; the others run in this one."""


@pytest.mark.parametrize(("words", "told"), CASES, ids=[" ".join(words)[:60] for words, _ in CASES])
def test_bad_input_is_one_line_and_code_2(
    words: tuple[str, ...], told: tuple[str, ...], refused: Callable[..., str], tmp_path: Path
) -> None:
    """The line names what is wrong and, where possible, the nearest valid word."""
    line = refused(*words, cold=words in COLD)
    for part in told:
        assert part in line, line
    assert not (tmp_path / "runs").exists() or not any((tmp_path / "runs").rglob("journal.jsonl"))


def test_malformed_yaml_names_file_and_line(refused: Callable[..., str], tmp_path: Path) -> None:
    """A syntax error in a recipe or an accelerate configuration is reported with file and line."""
    (tmp_path / "mine.yaml").write_text("recipe: arithmetic\ngrpo:\n  learning_rate: [1\nseed: 3\n")
    assert "mine.yaml:4" in refused("train", "mine.yaml").replace(", line ", ":")
    (tmp_path / "acc.yaml").write_text("distributed_type: MULTI_CPU\n  num_processes: 2\n")
    line = refused("launch", "--accelerate-config", "acc.yaml", str(SCRIPTS / "sft.py"))
    assert "acc.yaml" in line
    assert "line 2" in line or ":2" in line
