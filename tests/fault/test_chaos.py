"""A slice of the fault campaign: faults of many kinds, each recovered as specified, with equal weights."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.chaos import ROOT, read_results


@pytest.mark.full
@pytest.mark.timeout(2000)
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_ten_faults_are_recovered_as_specified(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "support.chaos", "--faults", "10", "--seed", "1"]
    ran = subprocess.run(
        [*command, "--work", str(tmp_path)], cwd=ROOT, env={**os.environ, "PYTHONPATH": "tests"}, timeout=1800
    )
    results = read_results(tmp_path)
    assert ran.returncode == 0, [(one["case"], one["kind"], one["wrong"]) for one in results if one["wrong"]]
    assert len(results) >= 10
    assert (tmp_path / "page.html").is_file()
