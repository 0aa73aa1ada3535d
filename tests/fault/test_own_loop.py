"""Scripts that train with no Trainer and no loop: every sentence and exit code is true of what happens."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from pathlib import Path

import pytest
from support.loops import differences
from support.references import torchrun
from support.runs import BIN, SCRIPTS, Run, Runs, alive

SCRIPT = str(SCRIPTS / "own_loop.py")
ACCELERATE = str(SCRIPTS / "accelerate_loop.py")
SAID = "no Trainer and no loop: a restart runs the script from the beginning; nothing is saved"
LONG = ("--iterations", "100000", "--seconds", "0.02")
full = pytest.mark.full


def begun(run: Run) -> Run:
    """Start a run and wait until its script trains."""
    run.start().until(lambda events: any(event.get("to") == "running" for event in events), 120)
    return run


def check_said(run: Run) -> str:
    """Return the output of a run that has said once what a restart means, and has claimed nothing else."""
    text = run.output.read_text()
    assert text.count(SAID) == 1, text
    ours = "\n".join(line for line in text.splitlines() if "grpo-run: " in line or line.startswith("    "))
    claims = (
        "checkpoint at",
        "no checkpoint yet",
        "resume",
        "before the first step",
        "at step",
        "of train()",
    )
    for word in claims:
        assert word not in ours, ours
    return text


def undisturbed(tmp_path: Path, script: str, *arguments: str, ranks: int = 2) -> str:
    """Return the digest of the weights that torchrun's run ends with, in `torchrun/`."""
    folder = tmp_path / "torchrun"
    folder.mkdir()
    torchrun(folder, ["--standalone", "--nproc-per-node", str(ranks), script, *arguments])
    return next(folder.rglob("weights.sha256")).read_text()


def test_a_killed_rank_restarts_the_script_from_its_beginning(runs: Runs, tmp_path: Path) -> None:
    """The script ends as if nothing had happened. An injected fault by step is said to be impossible."""
    run = runs(
        "--on-end", "cat > end.json", "--nproc-per-node", "2", "--inject", "kill@rank1:step2", SCRIPT,
        "--how", "kill"
    ).start().ended()  # fmt: skip
    text = check_said(run)
    assert "FAULT Rank 1 was killed by SIGKILL.\n" in text
    assert "restarts the script from its beginning" in text
    assert "RECOVERED the script trains again, from its beginning" in text
    assert len(re.findall(r"^begins", text, re.MULTILINE)) == 2
    assert "kill@rank1:step2 (without a Trainer or a loop, steps are not counted)" in text
    assert (
        "Finished after 1 restart. The script used no Trainer and no loop, so no steps were counted." in text
    )
    record = json.loads((tmp_path / "end.json").read_bytes())
    assert (record["state"], record["trains_without_trainer"], record["goodput"]) == ("finished", True, None)


@full
@pytest.mark.parametrize(
    ("how", "code", "sentence", "end"),
    [
        ("exception", 0, "Rank 1 raised ValueError: a defect", "Finished after 1 restart."),
        ("oserror", 0, "Rank 1 raised OSError: the disk", "Finished after 1 restart."),
        ("interrupt", 0, "Rank 1 raised KeyboardInterrupt", "Finished after 1 restart."),
        ("lock", 0, "Rank 1 waits for a lock", "Finished after 1 restart."),
        ("always", 93, "Rank 1 raised ValueError: at the same", "again at the same place."),
        ("os-exit", 0, "it counts as finished", "Finished, no faults."),
    ],
)
def test_every_fault_is_described_as_it_was(how: str, code: int, sentence: str, end: str, runs: Runs) -> None:
    """A fault that happens once costs a restart from the beginning; one that repeats at the same place ends
    the run.
    """
    run = (
        runs("--nproc-per-node", "2", SCRIPT, "--how", how, "--at", "50", "--iterations", "60")
        .start()
        .ended(code)
    )
    text = check_said(run)
    assert sentence in text
    assert end in text
    assert ("restarts the script from its beginning" in text) == (how != "os-exit")


def test_a_stop_is_short_and_does_not_ask_for_a_requeue(runs: Runs, tmp_path: Path) -> None:
    """SIGTERM reaches the ranks at once. Status, `save` and `--on-end` say that nothing is saved. The code is
    93.
    """
    run = begun(
        runs("--on-end", "cat > end.json", "--nproc-per-node", "2", SCRIPT, *LONG, metrics="127.0.0.1:0")
    )
    status = run.status()
    assert (status["state"], status["trains_without_trainer"], status["goodput"]) == ("running", True, None)
    assert status["sentence"] == f"Running. {SAID[0].upper()}{SAID[1:]}."
    saved = subprocess.run(
        [str(BIN / "grpo-run"), "save", str(run.directory)], capture_output=True, text=True
    )
    assert (saved.returncode, saved.stdout[:23]) == (1, "nothing can be saved: t")
    pids = [run.pid(0), run.pid(1)]
    run.command("stop")
    run.ended(93, timeout_seconds=25)  # far below --stop-timeout
    assert alive(pids) == []
    assert "Stopped. The same command runs the script from the beginning; nothing is saved." in check_said(
        run
    )
    record = json.loads((tmp_path / "end.json").read_bytes())
    assert (record["state"], record["exit_code"], record["incident"]) == ("stopped", 93, None)
    assert run.events("incident") == []


@full
@pytest.mark.parametrize(
    ("handler", "number", "code"),
    [("0", signal.SIGTERM, 0), ("75", signal.SIGINT, 75), ("never", signal.SIGTERM, 93)],
)
def test_the_script_s_own_handler_decides_how_a_stop_ends(
    handler: str, number: int, code: int, runs: Runs, tmp_path: Path
) -> None:
    """It has time to save, within a bound, and its exit code is the run's. The same command starts the script
    again.
    """
    arguments = ("--stop-timeout", "5", "--nproc-per-node", "2", SCRIPT, *LONG, "--handler", handler)
    run = begun(runs(*arguments))
    run.send_signal(number)
    run.ended(code)
    assert run.status()["state"] == "stopped"
    text = check_said(run)
    handled = [(tmp_path / f"handled.{rank}").exists() for rank in (0, 1)]
    if handler == "never":
        assert "Ranks did not stop within" in text
    else:
        assert handled == [True, True]
        assert handler == "75" or f"Stopped: the script returned {handler}." in text
    run.start()  # it is not finished
    run.until_event("attempt_started", count=2, timeout_seconds=120)


@full
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("ranks", "mode"), [(1, ()), (2, ()), (2, ("--fsdp2",))], ids=["one rank", "DDP of 2", "FSDP2 of 2"]
)
def test_an_accelerate_loop_killed_at_every_step_goes_on_from_its_last_save(
    ranks: int, mode: tuple[str, ...], runs: Runs, tmp_path: Path
) -> None:
    """Two epochs of 6 steps, a save every 4. The steps after a save are repeated; weights and losses are
    torchrun's. The script's own saves do not refill the budget. With three ranks a new process of such a
    script adds its first gradients in another order, under torchrun as well.
    """
    words = ("--steps", "12", "--save-every", "4", *mode)
    undisturbed(tmp_path, ACCELERATE, *words, ranks=ranks)
    kills = [str(step) for step in range(1, 13)]
    options = ("--max-restarts", "12", "--nproc-per-node", str(ranks))
    run = runs(*options, ACCELERATE, *words, "--kill-at", *kills).start().ended(timeout_seconds=600)
    assert len(run.events("incident")) == len(kills), run.tail()
    begins = re.findall(r"^begins at (\d+)", run.output.read_text(), re.MULTILINE)
    assert [int(step) for step in begins] == [0] * 5 + [4] * 4 + [8] * 4
    different = differences(tmp_path / "out", tmp_path / "torchrun" / "out")
    assert not different, "\n".join([*different, run.tail()])


@full
def test_transformers_can_be_imported_after_an_optimizer_step(runs: Runs) -> None:
    """Torch imports a part of itself at the first step, and a warm rank has that part already."""
    run = (
        runs("--nproc-per-node", "2", "--max-restarts", "0", str(SCRIPTS / "late_import.py"), cold=True)
        .start()
        .ended()
    )
    assert "Trainer 2" in run.output.read_text()
