"""`grpo-run rehearse` says of a job what is true of it, touches nothing of it, and leaves nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import warm
from support.runs import BIN, CONFIGS, SCRIPTS

ROOT = CONFIGS.parent.parent
JOB = ("--save-steps", "4", "--save-total-limit", "2")


def rehearse(
    folder: Path, *words: str, script: Path = SCRIPTS / "rehearsed.py", timeout_seconds: float = 600.0
) -> tuple[int, str]:
    """Rehearse a job whose output directory is `real`; return the exit code and what was printed.

    Whatever happens, no process, snapshot or file of the rehearsal may be left.
    """
    temporary, snapshots = folder / "tmp", folder / "snapshots"
    temporary.mkdir()
    snapshots.mkdir()
    own, _, launches = " ".join(words).partition(" -- ")
    options, _, arguments = launches.partition(" -- ")
    environment = {
        **os.environ, **warm.QUIET, "TMPDIR": str(temporary), "COLUMNS": "2000",
        "GRPO_RUN_TEST_MARKERS": str(folder),
    }  # fmt: skip
    output = ("--output-dir", str(folder / "real")) if script.parent == SCRIPTS else ()
    code, printed = warm.run(
        [str(BIN / "grpo-run"), "rehearse", "--snapshot-dir", str(snapshots), *own.split(), *options.split(),
         str(script), *output, *arguments.split()],
        cwd=ROOT, environment=environment, timeout_seconds=timeout_seconds,
    )  # fmt: skip
    assert not [*temporary.glob("grpo-run-rehearse-*")], printed
    assert not [*snapshots.iterdir()], printed
    found = subprocess.run(
        [sys.executable, "-c", FIND, str(temporary)], capture_output=True, text=True, timeout=60, check=True
    )
    assert not found.stdout, f"left: {found.stdout}\n{printed}"
    return code, " ".join(printed.replace("│", " ").split())


FIND = """
import pathlib, sys
for one in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
    try:
        text = one.read_bytes().replace(b"\\0", b" ").decode(errors="replace")
    except OSError:
        continue
    if sys.argv[1] + "/grpo-run-rehearse-" in text:
        print(one, text)
"""


def test_a_healthy_job_holds_and_its_directory_is_not_touched(tmp_path: Path) -> None:
    code, printed = rehearse(tmp_path, f"--only kill --  -- {' '.join(JOB)}")
    assert code == 0, printed
    for said in ("kill: held", "signal of rank 0"):
        assert said in printed, printed
    assert not (tmp_path / "real").exists()


@pytest.mark.full
@pytest.mark.parametrize(
    ("weakness", "only", "said"),
    [
        ("fails-again", "kill", "the script fails when it is started again"),
        ("forgets", "kill", "the script ignores the checkpoint"),
        ("shuffles", "kill", "the rows, or their order, come from a generator without a seed"),
        ("judges", "kill", "reward `judge` differs between two calls with the same arguments"),
        ("writes", "kill", "the script, or another run, writes there"),
    ],
)
def test_a_weakness_is_found_and_named(tmp_path: Path, weakness: str, only: str, said: str) -> None:
    code, printed = rehearse(tmp_path, f"--only {only} --  -- --weakness {weakness} {' '.join(JOB)}")
    assert code == 1, printed
    assert said in printed, printed


@pytest.mark.full
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_an_output_directory_without_room_is_found(tmp_path: Path) -> None:
    real = tmp_path / "real"
    real.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(real)], check=True, timeout=30)
    try:
        code, printed = rehearse(tmp_path, f"--only kill --  -- {' '.join(JOB)}")
    finally:
        subprocess.run(["umount", str(real)], check=True, timeout=30)
    assert code == 1, printed
    assert "has no room" in printed, printed


@pytest.mark.full
@pytest.mark.parametrize(
    ("script", "options", "arguments"),
    [
        (ROOT / "examples" / "grpo.py", "--nproc-per-node 2", ""),
        (SCRIPTS / "best_model.py", "", "--best-at 4"),
        (SCRIPTS / "grpo.py", "", f"--lora {' '.join(JOB)}"),
        (SCRIPTS / "grpo.py", f"--accelerate-config {CONFIGS / 'zero2.yaml'}", " ".join(JOB)),
        (SCRIPTS / "loops.py", "", "--save-every 2"),
    ],
    ids=["example", "best-model", "peft", "zero2", "loop"],
)
def test_public_kinds_of_scripts_hold(tmp_path: Path, script: Path, options: str, arguments: str) -> None:
    code, printed = rehearse(tmp_path, f"--for 10m -- {options} -- {arguments}", script=script)
    if script.parent == SCRIPTS:  # they write the digest of their weights into the real directory
        assert "untouched: SHORT" in printed, printed
        assert code == printed.count("SHORT") == 1, printed
    else:
        assert code == 0, printed
    assert "not run" not in printed, printed


@pytest.mark.full
def test_a_drill_that_did_not_run_is_listed_and_ends_with_1(tmp_path: Path) -> None:
    code, printed = rehearse(tmp_path, f"--for 12s --only kill,term --  -- {' '.join(JOB)}")
    assert code == 1, printed
    assert "term: not run" in printed, printed
