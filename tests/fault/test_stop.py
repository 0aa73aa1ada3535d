"""Requested stops, forced stops, and the death of the supervisor."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from support import containers
from support.references import undisturbed
from support.runs import BIN, SCRIPTS, WITH_SCRIPTS, Run, Runs, alive, descendants, digest, free_port
from support.trainer_and_loop import LOOP, TRAINER

from grpo_run.runtime.checkpoints.digests import verify_digests
from grpo_run.runtime.checkpoints.manifest import read_manifest
from grpo_run.runtime.checkpoints.search import snapshot_places
from grpo_run.runtime.supervisor.stop import SAME_SECONDS

STEPS = ("--max-steps", "16", "--save-steps", "8")


@pytest.mark.parametrize(
    ("script", "ways", "cold"),
    [
        pytest.param(TRAINER, ("group", "command", "container"), None, id="trainer"),
        pytest.param(LOOP, ("SIGTERM",), None, id="loop"),
        pytest.param(TRAINER, ("SIGTERM", "SIGINT"), True, marks=pytest.mark.full, id="trainer-cold"),
        pytest.param(
            LOOP, ("SIGINT", "command", "container"), None, marks=pytest.mark.full, id="loop-otherwise"
        ),
    ],
)
def test_stop_saves_on_one_step_and_the_same_command_resumes(
    script: str, ways: tuple[str, ...], cold: bool | None, runs: Runs, tmp_path: Path
) -> None:
    """All ranks stop at one step with one checkpoint and code 75; the run is stopped, not failed.

    The same command resumes, is stopped in the next way, and ends with equal weights. The command of
    `--on-end` is told every end. A signal to the process group reaches the supervisor alone.
    """
    run = runs(
        "--on-end", "cat > end.json", "--nproc-per-node", "2", str(SCRIPTS / script), "--output-dir", "ours",
        *STEPS, "--step-seconds", "0.05", cold=cold,
    )  # fmt: skip
    began_at = [0]
    for number, way in enumerate(ways, 1):
        with run.held(after=3):
            run.start().until_step(began_at[-1] + 3, timeout_seconds=150)
            if way in ("command", "container"):
                shown = run.command("stop") if way == "command" else stop_from_another_container(run)
                assert ("in another container" in shown) == (way == "container")
            elif way == "group":
                os.killpg(run.process.pid, signal.SIGTERM)
            else:
                run.send_signal(getattr(signal, way))
            run.until_event("stop_requested", count=number)
        run.ended(75)
        run.cold = None
        status = run.status()
        assert (status["state"], status["recoveries"]) == ("stopped", [])
        record = json.loads((tmp_path / "end.json").read_bytes())
        (tmp_path / "end.json").unlink()
        assert (record["state"], record["exit_code"], record["checkpoint"]) == (
            "stopped",
            75,
            status["checkpoint"],
        )
        stopped_at = status["checkpoint"]["step"]
        assert began_at[-1] + 3 <= stopped_at < 16
        assert status["step"] == stopped_at
        began_at.append(stopped_at)
    run.start().ended()
    assert digest(tmp_path / "ours") == undisturbed(script, 16)
    assert [event["step"] for event in run.events("train_started") if event["rank"] == 0] == began_at
    assert json.loads((tmp_path / "end.json").read_bytes())["state"] == "finished"


def stop_from_another_container(run: Run) -> str:
    """Run `grpo-run stop` in another namespace of pids, from which it cannot signal the supervisor."""
    if reason := containers.missing("--pid", "--fork"):
        pytest.skip(reason)
    inside = ["unshare", "--pid", "--fork", "--mount-proc", str(BIN / "grpo-run"), "stop", str(run.directory)]
    return subprocess.run(inside, check=True, timeout=60, capture_output=True, text=True).stdout


@pytest.mark.parametrize(
    ("script", "start", "cold"),
    [
        pytest.param(TRAINER, (), None, id="trainer-warm"),
        pytest.param(TRAINER, (), True, marks=pytest.mark.full, id="trainer-cold"),
        pytest.param(TRAINER, ("--no-preload",), True, marks=pytest.mark.full, id="trainer-fresh"),
    ],
)
def test_killed_supervisor_leaves_no_orphan_and_the_same_command_resumes(
    script: str, start: tuple[str, ...], cold: bool | None, runs: Runs, tmp_path: Path
) -> None:
    """After SIGKILL of the supervisor no rank is alive within 2 s.

    The same command resumes to equal weights.
    """
    run = runs(
        *start, "--nproc-per-node", "2", str(SCRIPTS / script), "--output-dir", "ours", *STEPS,
        "--step-seconds", "0.05", cold=cold,
    )  # fmt: skip
    with run.held(after=10):
        run.start().until_step(10, timeout_seconds=150)
        family = list(descendants(run.process.pid))
        assert len(family) >= 2
        run.process.kill()
        run.process.wait()
        deadline = time.monotonic() + 2.0
        while alive(family) and time.monotonic() < deadline:
            time.sleep(0.01)
    assert alive(family) == []
    assert run.status()["state"] == "unknown"
    run.cold = None
    run.start().ended()
    assert digest(tmp_path / "ours") == undisturbed(script, 16)


SHORT = ("--output-dir", "ours", "--max-steps", "4", "--save-steps", "4")


@pytest.mark.parametrize(
    ("second", "after_seconds"),
    [(signal.SIGINT, 0.0), pytest.param(signal.SIGTERM, SAME_SECONDS + 0.1, marks=pytest.mark.full)],
)
def test_second_signal_stops_at_once(second: int, after_seconds: float, runs: Runs) -> None:
    """A second stop request does not wait for a rank that cannot reach its next vote: code 75."""
    run = runs("--nproc-per-node", "1", str(SCRIPTS / TRAINER), *SHORT)
    with run.held(after=1):
        run.start().until_step(1)
        pid = run.pid(0)
        run.send_signal(signal.SIGTERM)
        run.until_event("stop_requested")
        assert alive([pid]) == [pid]
        time.sleep(after_seconds)
        run.send_signal(second)
        run.ended(75, timeout_seconds=20)
    assert alive([pid]) == []


GUARD = """    if arguments.output_dir.exists() and any(arguments.output_dir.iterdir()):
        raise ValueError("the output directory is not empty")
"""


def test_a_run_with_long_paths_stops_before_its_first_save_and_starts_again_in_an_empty_directory(
    runs: Runs, tmp_path: Path
) -> None:
    """A script may refuse a directory that is not empty: the snapshot of a stop lies beside it until then. No
    path of a socket depends on the run directory or on TMPDIR, and the watchdog sees the ranks.
    """
    source, begin = (SCRIPTS / "grpo.py").read_text(), "    trainer = "
    assert begin in source
    (tmp_path / "guarded.py").write_text(source.replace(begin, GUARD + begin))
    temporary = tmp_path / ("t" * 220)
    temporary.mkdir()
    run = runs(
        "--nproc-per-node", "2", "guarded.py", "--output-dir", "ours", *STEPS, name="r" * 220,
        environment={**WITH_SCRIPTS, "TMPDIR": str(temporary)},
    )  # fmt: skip
    with run.held(after=1):
        run.start().until_step(1)
        run.send_signal(signal.SIGTERM)
        run.until_event("stop_requested")
        run.send_signal(signal.SIGINT)
        run.ended(75, timeout_seconds=30)
    assert list((tmp_path / "ours").iterdir()) == []
    asked = len(run.events("stop_requested"))
    with run.held(after=2):
        run.start().until_step(2)
        run.send_signal(signal.SIGTERM)
        run.until(lambda events: [one["event"] for one in events].count("stop_requested") > asked, 30.0)
    run.ended(75)
    assert list((tmp_path / "ours").iterdir()) == []
    assert len(list(tmp_path.glob("ours_grpo_run/*/call-1/snapshot-*"))) == 1
    run.start().ended()
    assert run.events("incident") == []
    assert run.status()["warnings"] == 0, run.tail()
    assert run.events("train_started")[-1]["step"] >= 2
    assert (tmp_path / "ours" / "checkpoint-16").exists()
    assert not (tmp_path / "ours_grpo_run").exists()
    assert digest(tmp_path / "ours") == undisturbed("grpo.py", 16)


def test_a_stop_before_the_first_step_does_not_wait(runs: Runs, tmp_path: Path) -> None:
    """There is nothing to save: one signal is enough. The script may have a Trainer, so it is to be
    requeued.
    """
    (tmp_path / "stuck.py").write_text("import time\ntime.sleep(300)\n")
    run = runs("--nproc-per-node", "1", "stuck.py").start()
    run.until_event("rank_started")
    pid = run.pid(0)
    time.sleep(0.3)  # it has begun to sleep
    run.send_signal(signal.SIGTERM)
    run.ended(75, timeout_seconds=20)
    assert alive([pid]) == []
    assert run.events("incident") == []
    assert "Stopped before the first step of a Trainer." in run.printed()
    assert "SIGTERM: stopping at once, because no step has finished" in run.printed()


@pytest.mark.full
def test_a_stop_while_another_node_is_awaited_ends_the_run(runs: Runs, tmp_path: Path) -> None:
    """Torch waits for it in C++, where no signal handler runs."""
    (tmp_path / "train.py").write_text("import trl\n")
    port = str(free_port())
    run = runs(
        "--nnodes", "2", "--node-rank", "0", "--master-addr", "127.0.0.1", "--master-port", port, "train.py"
    ).start()
    run.until_event("run_started")
    time.sleep(1.0)  # the agent has entered the rendezvous
    run.send_signal(signal.SIGTERM)
    run.ended(75, timeout_seconds=20)


def test_save_request_makes_one_joint_checkpoint(runs: Runs, tmp_path: Path) -> None:
    """`grpo-run save` writes a complete checkpoint outside the schedule, and training continues.

    With `--wait` it prints the path, and rotation leaves the checkpoint.
    """
    run = runs(
        "--nproc-per-node", "2", str(SCRIPTS / TRAINER), "--output-dir", "ours", "--max-steps", "12",
        "--save-steps", "4", "--save-total-limit", "1", "--step-seconds", "0.3",
    ).start()  # fmt: skip
    run.until_step(1)
    path = Path(run.command("save", "--wait").strip())
    manifest = read_manifest(path)
    inside, beside = snapshot_places(tmp_path / "ours", *manifest.train_call_key)
    assert path.parent == (beside if manifest.step < 4 else inside), (
        "before the first checkpoint it is beside"
    )
    assert manifest.kept
    run.ended()
    assert list((tmp_path / "ours").glob("checkpoint-*")) == [tmp_path / "ours" / "checkpoint-12"]
    verify_digests(path, read_manifest(path).files)


@pytest.mark.parametrize(
    ("snapshots", "during_save", "stops_at"),
    [
        pytest.param("1", False, 4, marks=pytest.mark.full, id="before-a-snapshot"),
        pytest.param("4", True, 4, id="during-a-snapshot"),
        pytest.param("100", False, 5, marks=pytest.mark.full, id="without-a-snapshot"),
    ],
)
def test_a_stop_makes_one_checkpoint_within_two_steps(
    snapshots: str, during_save: bool, stops_at: int, runs: Runs, tmp_path: Path
) -> None:
    """What is saved while the stop is pending is its checkpoint, on disk when the run ends; no further step
    is taken.
    """
    run = runs(
        "--snapshot-every", snapshots, "--nproc-per-node", "2", str(SCRIPTS / "slow_saves.py"),
        "--output-dir", "ours", "--max-steps", "12", "--save-steps", "12",
    )  # fmt: skip
    held, stopping = tmp_path / "hold-save", "stop_requested"
    held.touch() if during_save else None
    with run.held(after=12 if during_save else 3):
        run.start().until_step(3, timeout_seconds=150)
        if during_save:
            run.until(lambda events: (tmp_path / "saving").exists())
        run.send_signal(signal.SIGTERM)
        run.until_event(stopping)
    held.unlink(missing_ok=True)
    run.ended(75)
    names = [event["event"] for event in run.events()]
    after = run.events()[names.index(stopping) :]
    assert [event["step"] for event in after if event["event"] == "checkpoint_staged"] == [stops_at]
    assert run.status()["step"] == run.status()["checkpoint"]["step"] == stops_at
    path = Path(run.status()["checkpoint"]["path"])
    verify_digests(path, read_manifest(path).files)


HANDLES = f"""
import os, runpy, signal, sys
from pathlib import Path
assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
if os.environ["RANK"] == "1":
    signal.signal(signal.SIGUSR1, lambda number, frame: Path("handled").touch())
sys.path.insert(0, {str(SCRIPTS)!r})
runpy.run_path({str(SCRIPTS / TRAINER)!r}, run_name="__main__")
"""


@pytest.mark.parametrize(
    "start",
    [
        pytest.param(("--reward-workers", "1"), id="forked"),
        pytest.param(("--no-preload",), marks=pytest.mark.full, id="fresh"),
    ],
)
def test_a_named_signal_to_every_process_saves_and_stops(
    start: tuple[str, ...], runs: Runs, tmp_path: Path
) -> None:
    """As Slurm sends it: the supervisor stops the run, helpers and ranks ignore it, and the script's own
    handler runs.
    """
    (tmp_path / "train.py").write_text(HANDLES)
    run = runs(
        "--signals-to-handle", "SIGTERM,SIGUSR1", *start, "--nproc-per-node", "2", "train.py",
        "--output-dir", "ours", *STEPS, cold=True if "--no-preload" in start else None,
    )  # fmt: skip
    with run.held(after=3):
        run.start().until_step(3, timeout_seconds=150)
        for pid in (*descendants(run.process.pid), run.process.pid):
            os.kill(pid, signal.SIGUSR1)
        (stop,) = run.until(lambda events: [e for e in events if e["event"] == "stop_requested"])
    run.ended(75)
    assert stop["why"] == "SIGUSR1"
    assert (tmp_path / "handled").exists()
    status = run.status()
    assert (status["state"], status["recoveries"]) == ("stopped", [])
    assert status["checkpoint"]["step"] == status["step"] >= 3
