"""A plain TRL script under `grpo-run launch`: unchanged, equal, finished once, described truly."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from support.runs import BIN, SCRIPTS, Run, digest, undisturbed

STEPS = ("--max-steps", "12", "--save-steps", "4")


@pytest.mark.parametrize("script", ["grpo.py", "rloo.py", "sft.py", "sft_then_grpo.py"])
def test_weights_equal_torchruns(script: str, runs: Callable[..., Run], tmp_path: Path) -> None:
    """An undisturbed run under supervision ends with the weights torchrun ends with."""
    run = runs("--nproc-per-node", "2", str(SCRIPTS / script), "--output-dir", "ours", *STEPS).start()
    assert run.wait() == 0, run.tail()
    assert digest(tmp_path / "ours") == undisturbed(script, 12)
    status = run.status()
    assert status["state"] == "finished"
    assert status["recoveries"] == []
    assert status["attempts"] == 1
    assert status["checkpoint"]["verified"] is True


def test_same_command_on_a_finished_run_says_so(tmp_path: Path) -> None:
    """Without a run id the command finds its run again; finished, it points to --fresh and ends 0."""
    command = [
        str(BIN / "grpo-run"), "launch", "--metrics-addr", "off", "--nproc-per-node", "1",
        str(SCRIPTS / "sft.py"), "--output-dir", "out", "--max-steps", "2", "--save-steps", "2",
    ]  # fmt: skip
    first = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert first.returncode == 0, first.stderr
    again = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert again.returncode == 0
    assert "has finished" in again.stdout
    assert "--fresh" in again.stdout
    assert len(list((tmp_path / "runs").iterdir())) == 1
    fresh = subprocess.run(
        [*command[:2], "--fresh", *command[2:]], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert fresh.returncode == 0, fresh.stderr
    assert len(list((tmp_path / "runs").iterdir())) == 2
    assert "starts from step 0" in fresh.stderr


def test_second_launch_on_a_live_run_is_refused(runs: Callable[..., Run]) -> None:
    """One supervisor a run directory: the second gets one line with the first's pid, and code 2."""
    arguments = ("--nproc-per-node", "1", str(SCRIPTS / "grpo.py"), "--output-dir", "out", "--max-steps", "40", "--save-steps", "4", "--step-seconds", "0.1")  # fmt: skip
    first = runs(*arguments).start()
    first.until_step(2)
    assert first.process is not None
    second = subprocess.run(
        [str(BIN / "grpo-run"), "launch", "--run-dir", str(first.directory), *arguments],
        cwd=first.folder, env=first.environment, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert second.returncode == 2
    assert len(second.stderr.strip().splitlines()) == 1
    assert str(first.process.pid) in second.stderr


def test_module_target(runs: Callable[..., Run], tmp_path: Path) -> None:
    """`-m package.module` runs as `python -m` would: package known, arguments passed, working directory first."""
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "__init__.py").touch()
    (tmp_path / "jobs" / "hello.py").write_text(
        "import sys, pathlib\n"
        "pathlib.Path('seen.txt').write_text(repr((__name__, __package__, sys.argv[1:], sys.path[0])))\n"
    )
    run = runs("--nproc-per-node", "1", "-m", "jobs.hello", "--x", "1").start()
    assert run.wait() == 0, run.tail()
    assert (tmp_path / "seen.txt").read_text() == repr(("__main__", "jobs", ["--x", "1"], str(tmp_path)))


def test_script_that_sets_import_time_variables_gets_a_fresh_interpreter(
    runs: Callable[..., Run], tmp_path: Path
) -> None:
    """A script that assigns HF_HOME before importing sees its libraries read it."""
    (tmp_path / "early.py").write_text(
        "import os, sys\n"
        "assert 'transformers' not in sys.modules\n"
        "os.environ['HF_HOME'] = os.path.abspath('cache')\n"
        "import huggingface_hub.constants as c, pathlib\n"
        "pathlib.Path('seen.txt').write_text(c.HF_HOME)\n"
    )
    run = runs("--nproc-per-node", "1", "early.py").start()
    assert run.wait() == 0, run.tail()
    assert (tmp_path / "seen.txt").read_text() == str(tmp_path / "cache")
    assert "HF_HOME" in run.tail()


def test_fresh_interpreters_train_equally(runs: Callable[..., Run], tmp_path: Path) -> None:
    """`--no-preload` is guarded alike: killed, resumed, same weights."""
    run = runs(
        "--no-preload", "--nproc-per-node", "1", str(SCRIPTS / "grpo.py"), "--output-dir", "ours", *STEPS
    ).start()
    run.until_step(5)
    run.kill(0)
    assert run.wait() == 0, run.tail()
    assert digest(tmp_path / "ours") == undisturbed("grpo.py", 12, ranks=1)
    assert len(run.status()["recoveries"]) == 1
