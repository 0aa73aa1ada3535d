"""A script that is proved twice not to end: 0 if it has run its last line and all is on disk, else 93; the
line is named.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.references import undisturbed
from support.runs import SCRIPTS, Runs, digest

from grpo_run.runtime.checkpoints.manifest import read_manifest

TRAINS = f"""
import runpy, sys
sys.path.insert(0, {str(SCRIPTS)!r})
runpy.run_path({str(SCRIPTS / "grpo.py")!r}, run_name="__main__")
"""
THREAD = """
import threading
def keep_alive():
    threading.Event().wait()  # HANG
threading.Thread(target=keep_alive).start()
"""
EVENT_LOOP = """
import asyncio
async def serve():
    await asyncio.Event().wait()
asyncio.run(serve())  # HANG
"""


@pytest.mark.parametrize(
    ("end", "code"),
    [
        pytest.param(THREAD, 0, id="thread"),
        pytest.param(EVENT_LOOP, 93, marks=pytest.mark.full, id="event-loop"),
    ],
)
def test_the_second_proof_of_a_hang_after_training_ends_the_run(
    end: str, code: int, runs: Runs, tmp_path: Path
) -> None:
    """One restart, which trains nothing again; then the run ends. Its model is on disk in either case."""
    script = tmp_path / "train.py"
    script.write_text(TRAINS + end)
    (line,) = (number for number, text in enumerate(script.read_text().splitlines(), 1) if "# HANG" in text)
    run = runs(
        "--nproc-per-node", "2", "train.py", "--output-dir", "ours", "--max-steps", "4", "--save-steps", "4"
    ).start()
    run.ended(code)
    assert [event["action"] for event in run.events("action")] == ["restart", "stop"]
    assert run.printed().count(f"at train.py:{line} in ") >= 2
    assert read_manifest(tmp_path / "ours" / "checkpoint-4").step == 4
    assert digest(tmp_path / "ours") == undisturbed("grpo.py", 4)
    assert not any(event["attempt"] == 1 for event in run.events("step_committed"))
