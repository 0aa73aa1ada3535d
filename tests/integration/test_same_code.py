"""A script imports the code that it imports under torchrun, however it chooses it; a library that cannot be
preloaded is no fault.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.runs import Run, Runs

FOUND_AT_RUN_TIME = {
    "train.py": "import torch, choose, trl\nprint('TRL', trl.__file__)\n",
    "choose.py": "import os, sys\nsys.path[:0] = [os.environ['WHERE']]\n",
    "vendor/trl/__init__.py": "",
}
FOUND_BEFORE = {
    "train.py": "import trl, rewards\nprint('TRL', trl.__file__)\n",
    "rewards.py": "",
    "trl/__init__.py": "",
}
SET_BY_A_MODULE = {
    "train.py": "import settings\nfrom huggingface_hub.constants import HF_HOME\nprint('HOME', HF_HOME)\n",
    "settings.py": "import os\nfor name in ['HF_HOME']:\n    os.environ[name] = '/elsewhere'\n",
}
CANNOT_BE_IMPORTED = {
    "train.py": "import os; del os.environ['BREAK']\nimport trl\nprint('TRL', trl.__name__)\n",
    "broken/wandb/__init__.py": (
        "import os\nif 'BREAK' in os.environ:\n    raise RuntimeError('no backend')\n"
    ),
    "broken/wandb-0.19.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: wandb\nVersion: 0.19.0\n",
    "broken/deepspeed/__init__.py": "raise RuntimeError('no backend')\n",
}
"""A copy of wandb that raises while the libraries are imported in advance, and a copy of DeepSpeed that
always raises.
"""


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


@pytest.mark.full
@pytest.mark.parametrize(
    ("files", "expected", "why"),
    [
        (FOUND_BEFORE, "TRL {folder}/trl/__init__.py", "the script would import trl from {folder}/trl"),
        (SET_BY_A_MODULE, "HOME /elsewhere", "the script sets HF_HOME"),
        (CANNOT_BE_IMPORTED, "TRL trl", "a library could not be imported in advance (RuntimeError"),
    ],
)
def test_other_code_or_variables_start_fresh_interpreters(
    runs: Runs, tmp_path: Path, files: dict[str, str], expected: str, why: str
) -> None:
    """A local `trl`, a variable that an imported module sets, and a library that raises when it is
    imported.
    """
    path = os.pathsep.join(filter(None, [str(tmp_path / "broken"), os.environ.get("PYTHONPATH")]))
    environment = {"BREAK": "1", "PYTHONPATH": path} if files is CANNOT_BE_IMPORTED else {}
    shown = launched(runs("train.py", environment=environment, cold=True), files, tmp_path)
    assert expected.format(folder=tmp_path) in shown
    assert why.format(folder=tmp_path) in shown
    assert "ranks start as fresh interpreters" in shown
