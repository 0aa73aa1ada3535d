"""`grpo-run rehearse` says of a job what is true of it, touches nothing of it, and leaves nothing."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from support import warm
from support.rollout_server import starting
from support.runs import BIN, CONFIGS, SCRIPTS

ROOT = CONFIGS.parent.parent
JOB = ("--save-steps", "4", "--save-total-limit", "2")
pytestmark = pytest.mark.timeout(1800)


def rehearse(
    folder: Path,
    *words: str,
    script: Path = SCRIPTS / "rehearsed.py",
    variables: Mapping[str, str] | None = None,
    timeout_seconds: float = 1700.0,
) -> tuple[int, str]:
    """Rehearse a job whose output directory is `real`; return the exit code and what was printed.

    Args:
        words: our options, those of the launch, and those of the script, apart by ` -- `. The time is ample.
        variables: of the environment, besides the usual ones.

    Whatever happens, no process, snapshot or file of the rehearsal may be left.
    """
    temporary, snapshots = folder / "tmp", folder / "snapshots"
    temporary.mkdir()
    snapshots.mkdir()
    own, _, launches = " ".join(words).partition(" -- ")
    options, _, arguments = launches.partition(" -- ")
    environment = {
        **os.environ, **warm.QUIET, "TMPDIR": str(temporary), "GRPO_RUN_TEST_MARKERS": str(folder),
        **(variables or {}),
    }  # fmt: skip
    output = ("--output-dir", str(folder / "real")) if script.parent == SCRIPTS else ()
    code, printed = warm.run(
        [str(BIN / "grpo-run"), "rehearse", "--snapshot-dir", str(snapshots), "--for", "25m", *own.split(),
         *shlex.split(options), str(script), *output, *arguments.split()],
        cwd=ROOT, environment=environment, timeout_seconds=timeout_seconds,
    )  # fmt: skip
    assert not [*temporary.glob("grpo-run-rehearse-*")], printed
    assert not [*snapshots.iterdir()], printed
    found = subprocess.run(
        [sys.executable, "-c", FIND, str(temporary)], capture_output=True, text=True, timeout=60, check=True
    )
    assert not found.stdout, f"left: {found.stdout}\n{printed}"
    return code, " ".join(printed.split())


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
    for said in ("kill held", "in step 5: SIGKILL to a rank", "Rank 0 was killed"):
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
    code, printed = rehearse(tmp_path, f" -- {options} -- {arguments}", script=script)
    if script.parent == SCRIPTS:  # they write the digest of their weights into the real directory
        assert "untouched FAILED" in printed, printed
        assert code == 1
        assert printed.count("FAILED") == 2, printed
    else:
        assert code == 0, printed
    assert "not run" not in printed, printed


@pytest.mark.full
def test_a_drill_that_did_not_run_is_listed_and_ends_with_1(tmp_path: Path) -> None:
    code, printed = rehearse(tmp_path, f"--for 12s --only kill,term --  -- {' '.join(JOB)}")
    assert code == 1, printed
    assert "term not run" in printed, printed


def server_of(folder: Path) -> str:
    """Return the command of a server, to which the run adds a port."""
    words = starting.command(folder, 0)
    return shlex.join(words[: words.index("--host")])


@pytest.mark.full
def test_a_server_of_the_run_is_killed_and_started_again(tmp_path: Path) -> None:
    options = shlex.join(["--rollout-server", server_of(tmp_path)])
    code, printed = rehearse(
        tmp_path, f"--only server -- {options} -- {' '.join(JOB)}", script=starting.SCRIPT
    )
    assert "server held" in printed, printed
    assert "weights equal; lost: nothing done: in step 5: SIGKILL to the rollout server" in printed, printed
    assert "FAILED: untouched." in printed, printed  # the script writes there by itself
    assert code == 1


def test_a_server_that_is_not_the_runs_is_not_touched(tmp_path: Path) -> None:
    """Not even if the script asks for it: the rehearsal is refused, and says what to do."""
    with starting.stand_in(tmp_path) as server:
        before = server.look()
        code, printed = rehearse(
            tmp_path, f"--only server --  -- {' '.join(JOB)}", script=starting.SCRIPT,
            variables=server.environment(),
        )  # fmt: skip
        assert code == 2, printed
        for said in (
            f"the script sends weights to {server.url},",
            "--rollout-server",
            f"--free-server {server.url}",
        ):
            assert said in printed, printed
        assert server.look() == before


@pytest.mark.full
def test_a_server_that_is_free_is_sent_weights_and_not_killed(tmp_path: Path) -> None:
    with starting.stand_in(tmp_path) as server:
        code, printed = rehearse(
            tmp_path, f"--only kill,server --free-server {server.url} --  -- {' '.join(JOB)}",
            script=starting.SCRIPT, variables=server.environment(),
        )  # fmt: skip
        assert "kill held" in printed, printed
        assert "server n/a" in printed, printed
        assert "the server is not this run's: it is not killed" in printed, printed
        assert server.process.poll() is None
        assert server.health() == 200
        assert code == 1  # of the directory


@pytest.mark.full
def test_a_tool_that_never_returns_is_ended_and_the_run_goes_on(tmp_path: Path) -> None:
    code, printed = rehearse(
        tmp_path, f"--only tool --  -- --kind quick {' '.join(JOB)}", script=SCRIPTS / "slow_tools.py"
    )
    assert "tool held" in printed, printed
    assert "seen: tool add was ended after 5 s; then finished" in printed, printed
    assert "weights equal; lost: nothing done: in step 5: a call of a tool" in printed, printed
    assert "FAILED: untouched." in printed, printed  # the script writes there by itself
    assert code == 1


@pytest.mark.full
def test_an_environment_of_a_public_example_is_drilled(tmp_path: Path) -> None:
    code, printed = rehearse(tmp_path, "--only tool --  -- ", script=ROOT / "examples" / "agent.py")
    assert code == 0, printed
    assert "tool held" in printed, printed


@pytest.mark.full
def test_a_fault_comes_in_the_middle_of_a_generation_batch(tmp_path: Path) -> None:
    """Between a whole one before and a whole one after it."""
    arguments = "--steps-per-generation 4 --num-iterations 2 --save-inside-rollouts"
    code, printed = rehearse(tmp_path, f"--only kill --  -- {arguments} {' '.join(JOB)}")
    assert code == 0, printed
    for said in ("done: 24 steps of the job, twice", "done: in step 13: SIGKILL", "weights equal"):
        assert said in printed, printed
