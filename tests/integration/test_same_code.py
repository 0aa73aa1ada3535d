"""A script imports the code that it imports under torchrun, however it chooses it; a library that cannot be
preloaded is no fault.
"""

from __future__ import annotations

from pathlib import Path

from support.runs import Run, Runs

FOUND_AT_RUN_TIME = {
    "train.py": "import torch, choose, trl\nprint('TRL', trl.__file__)\n",
    "choose.py": "import os, sys\nsys.path[:0] = [os.environ['WHERE']]\n",
    "vendor/trl/__init__.py": "",
}


def launched(run: Run, files: dict[str, str], folder: Path) -> str:
    """Write the files of a script, run it to its end, and return what was printed."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    run.start().ended()
    return run.output.read_text()


def test_a_path_chosen_at_run_time_is_followed(runs: Runs, tmp_path: Path) -> None:
    """The rank notices it when the script imports TRL, starts over, and says why."""
    run = runs("train.py", environment={"WHERE": str(tmp_path / "vendor")})
    shown = launched(run, FOUND_AT_RUN_TIME, tmp_path)
    assert f"TRL {tmp_path}/vendor/trl/__init__.py" in shown
    reason = f"the script would import trl from {tmp_path}/vendor/trl: ranks start as fresh interpreters"
    assert [event["text"] for event in run.events("warning")] == [reason]
