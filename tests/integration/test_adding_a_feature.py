"""The feature of docs/internals/adding-a-feature.md, built from the page: its option, event, metric and panel
work in a real run, beside which another feature is left out.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from support.feature_copies import add_feature, copy_without
from support.references import undisturbed
from support.runs import SCRIPTS, Run, digest

PAGE = Path(__file__).parents[2] / "docs" / "internals" / "adding-a-feature.md"
NAME = "long_prompts"
READ = """
import sys
from pathlib import Path
from grpo_run.dashboards.metrics.catalogue import RUN_METRICS
from grpo_run.runtime.history.run_directory import RunDirectory
from grpo_run.runtime.launching.reading import run_reader
from grpo_run.runtime.metrics import RunObservation

status = run_reader(RunDirectory(path=Path(sys.argv[1]))).read()
run = RunObservation(status=status, slots=(), first_rank=0, monotonic_seconds=0.0, wall_seconds=0.0)
(metric,) = [metric for metric in RUN_METRICS if metric.name == "grpo_long_prompts_total"]
print(float(metric.read(run)))
"""


def files_of_the_page() -> dict[str, str]:
    """Return the blocks of the page by the file that the line before each begins with."""
    block = re.compile(r"^`([\w./]+)`.*?^```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    blocks = block.findall(PAGE.read_text())
    return {Path(name).name: text for name, text in blocks}


def test_the_example_of_the_page_works(tmp_path: Path) -> None:
    """Two ranks train with it and without injections, through a kill, to the weights of an undisturbed run;
    the journal, the metric and the dashboard have what it adds.
    """
    files = files_of_the_page()
    assert {"__init__.py", "settings.py", "events.py", "rank.py", "metrics.py", "panels.json"} == set(files)
    folder = copy_without("injections", tmp_path / "copy")
    add_feature(folder, NAME, files)
    environment = {"PYTHONPATH": str(folder)}
    run = Run(
        tmp_path,
        ["--nproc-per-node", "2", "--count-prompts-above", "1", str(SCRIPTS / "grpo.py"),
         "--output-dir", "out", "--max-steps", "6"],
        environment=environment, program=(sys.executable, "-m", "grpo_run"), cold=True,
    )  # fmt: skip
    try:
        with run.held(4):
            run.start().until_step(3)
            run.kill(1)
            run.until_event("incident")
        run.ended()
        assert len(run.events("incident")) == 1
        seen = run.events("long_prompts_seen")
        assert {event["rank"] for event in seen} == {0, 1}
        directory = run.directory
    finally:
        run.close()

    assert digest(tmp_path / "out") == undisturbed("grpo.py", 6)

    def asked(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *words], cwd="/", env={**os.environ, **environment},
            check=False, capture_output=True, text=True, timeout=100,
        )  # fmt: skip

    value = asked("-c", READ, str(directory))
    assert value.stdout.strip() == str(float(sum(event["prompts"] for event in seen))), value.stderr
    assert asked("-m", "grpo_run", "dashboards", "export", str(tmp_path / "stack")).returncode == 0
    board = json.loads((tmp_path / "stack/grafana/dashboards/grpo-run-learning.json").read_text())
    titles = [panel["title"] for panel in board["panels"]]
    assert titles.index("Rollouts") < titles.index("Long prompts") < titles.index("Faults and recovery")
    refused = asked("-m", "grpo_run", "launch", "--count-prompts-above", "-1", str(SCRIPTS / "grpo.py"))
    assert refused.returncode == 2
    assert "--count-prompts-above must be 0 (none) or more, not -1" in refused.stderr
