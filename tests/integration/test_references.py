"""What other tests compare with is what torchrun produces; in `make test`, see `test_output_in_pipes.py`."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.references import torchrun, undisturbed
from support.runs import SCRIPTS, digest


@pytest.mark.full
@pytest.mark.parametrize("script", ["sft_then_grpo.py", "grpo.py"])
def test_warm_reference_equals_torchrun(script: str, tmp_path: Path) -> None:
    """Ranks forked from the warm launcher end with the weights of a real, cold torchrun."""
    command = [str(SCRIPTS / script), "--output-dir", "out", "--max-steps", "12"]
    torchrun(tmp_path, ["--standalone", "--nproc-per-node", "2", *command])
    assert undisturbed(script, 12) == digest(tmp_path / "out")
